"""`llmux pull`, `add` and `remove`: models of a hub, and their entries in the configuration."""
