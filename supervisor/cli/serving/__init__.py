"""`llmux serve`: assembles the daemon, runs it, stops it; its log."""
