"""The worker of language models. `worker` is the program; the modules below it know nothing of HTTP.

A request goes through `request` (what is asked), `prompt` (messages to tokens), `grammar` (what may be said), `decoder`
(tokens to further tokens, for all requests at once), `detokenize` and `formats` (tokens to text, thoughts and tool calls),
and `answers` (OpenAI's JSON).
"""
