"""What the runtimes on vLLM share: configuration keys, the memory plan, and what a model's folder says."""
