"""The worker for language models. `__main__` is the program; the other modules know nothing of HTTP.

A request passes through `request` (its parameters), `prompt` (messages to tokens), `grammar` (constraints on the output),
`decoder` (generation, for all requests at once), `response_builder` with `detokenize` and `formats` (tokens to text, reasoning
and tool calls), and `answers` (OpenAI's JSON).
"""
