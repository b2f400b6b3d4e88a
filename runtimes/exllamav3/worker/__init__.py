"""The worker. `model` loads a folder, `generation` runs the library's generator, `__main__` serves it."""
