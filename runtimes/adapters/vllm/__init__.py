"""Shared by the runtimes on vLLM: configuration keys, the memory plan, and facts from a model's folder."""
