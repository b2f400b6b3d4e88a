"""The worker. `model` loads a file and knows its vocabulary, `__main__` serves it."""
