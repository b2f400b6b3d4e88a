"""`llmux serve`: the daemon, put together and taken apart again; its log."""
