"""The worker for language models. `__main__` is the program; the other modules know nothing of HTTP.

The endpoints and all that needs no library are `runtimes.sdk.chat`. Here `prompt` makes tokens of messages, `grammar`
constrains the output, and `decoder` generates for all requests at once.
"""
