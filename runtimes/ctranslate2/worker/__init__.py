"""The worker. `model` loads a folder, `tokenizer` reads its text, `languages` finds a translation's, `__main__` serves it."""
