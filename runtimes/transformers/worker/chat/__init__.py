"""The worker for language models. `__main__` is the program; the other modules know nothing of HTTP.

The endpoints, and everything that needs no library, are in `runtimes.sdk.chat`. Here `prompt` turns messages into tokens,
`guide` constrains the output, and `decoder` generates for all requests at once.
"""
