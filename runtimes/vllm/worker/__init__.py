"""The worker program: the client of vLLM's engine behind our own endpoints."""
