"""The daemon's own API: its operations, their routes, and the OpenAPI document."""
