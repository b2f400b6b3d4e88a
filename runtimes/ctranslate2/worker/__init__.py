"""The worker. `model` loads a folder, `tokenizer` makes tokens of text, `languages` finds language tokens, `__main__` serves."""
