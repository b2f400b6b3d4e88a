"""OpenAI's Python SDK: chat, a stream, embeddings, and its Responses stream as Codex uses it."""

import json
import sys

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="any", max_retries=0)
hello = [{"role": "user", "content": "Hello"}]

whole = client.chat.completions.create(model="quick", messages=hello)
chunks = list(client.chat.completions.create(model="quick", messages=hello, stream=True))
vectors = client.embeddings.create(model="embed", input=["one", "two"]).data
with client.responses.stream(model="quick", input="Hello") as stream:
    kinds = [event.type for event in stream]
    response = stream.get_final_response()

json.dump(
    {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "models": sorted({whole.model, response.model, *(chunk.model for chunk in chunks)}),
        "vectors": [len(vector.embedding) > 0 for vector in vectors],
        "responses": response.output_text,
        "first_and_last": [kinds[0], kinds[-1]],
    },
    sys.stdout,
)
