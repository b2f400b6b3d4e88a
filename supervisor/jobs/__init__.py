"""Jobs: everything that runs longer than the request that asked for it."""
