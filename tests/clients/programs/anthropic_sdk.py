"""Anthropic's Python SDK: whole, streamed, counted, and an error that it understands."""

import json
import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], auth_token="any", max_retries=0)
hello = [{"role": "user", "content": "Hello"}]

whole = client.messages.create(model="quick", max_tokens=64, messages=hello)
with client.messages.stream(model="quick", max_tokens=64, messages=hello) as stream:
    streamed = "".join(stream.text_stream)
    final = stream.get_final_message()
try:
    client.messages.create(model="no-such-model", max_tokens=64, messages=hello)
    failure = None
except anthropic.NotFoundError as error:
    failure = error.body["error"]["type"]

json.dump(
    {
        "whole": whole.content[-1].text,
        "streamed": streamed,
        "models": [whole.model, final.model],
        "stop": [whole.stop_reason, final.stop_reason],
        "request_id": bool(whole._request_id),
        "counted": client.messages.count_tokens(model="quick", messages=hello).input_tokens > 0,
        "listed": "quick" in [model.id for model in client.models.list()],
        "failure": failure,
    },
    sys.stdout,
)
