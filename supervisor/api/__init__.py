"""The daemon's own API: its operations, and all that follows from them."""
