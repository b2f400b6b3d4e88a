"""Jobs: all work that runs longer than the request that started it."""
