"""LiteLLM as a library: chat, a stream, embeddings, a rerank, and an error with its class."""

import json
import sys

import litellm

litellm.suppress_debug_info = True
address = {"api_base": f"{sys.argv[1]}/v1", "api_key": "any", "num_retries": 0}
hello = [{"role": "user", "content": "Hello"}]

whole = litellm.completion(model="openai/quick", messages=hello, **address)
chunks = litellm.completion(model="openai/quick", messages=hello, stream=True, **address)
vectors = litellm.embedding(model="openai/embed", input=["one", "two"], **address).data
try:
    litellm.completion(model="openai/no-such-model", messages=hello, **address)
    failure = None
except litellm.NotFoundError as error:
    failure = type(error).__name__

json.dump(
    {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "vectors": [len(vector["embedding"]) > 0 for vector in vectors],
        "failure": failure,
    },
    sys.stdout,
)
