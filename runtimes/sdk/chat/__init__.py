"""Shared by all workers for language models: from a request's JSON to a prompt, and from tokens back to OpenAI's JSON.

`worker` has the endpoints. A request passes through `request` (its parameters), `tools`, `schema` and `messages` (its
conversation); the runtime's own worker renders the prompt and generates tokens; `response_builder` with `detokenize` and
`formats` makes text, reasoning and tool calls of these, and `answers` the JSON. `template` renders a chat template where the
model's library doesn't; it is the only module that needs Jinja.
"""
