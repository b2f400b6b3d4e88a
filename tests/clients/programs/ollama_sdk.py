"""Ollama's own client for Python: everything that it can ask for, with a key, at the address of Ollama's variable."""

import asyncio
import base64
import json
import os
import sys
import tempfile

os.environ |= {"OLLAMA_HOST": sys.argv[1], "OLLAMA_API_KEY": sys.argv[2]}

import ollama  # it reads the variables

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="  # a PNG
SCHEMA = {"type": "object", "properties": {"it": {"const": "is so"}}, "required": ["it"]}
client = ollama.Client()
hello = [{"role": "user", "content": "Hello"}]


def get_weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: Where.
    """
    return f"It is sunny in {city}."


def calls(message: ollama.Message) -> list:
    return [[call.function.name, dict(call.function.arguments)] for call in message.tool_calls or ()]


def refused(ask, *words, **fields):
    """The status and the message that it shows; a stream says it as soon as it is read."""
    try:
        answer = ask(*words, **fields)
        if fields.get("stream"):
            list(answer)
    except ollama.ResponseError as error:
        return [error.status_code, error.error]
    return None


async def at_once() -> str:
    parts = await ollama.AsyncClient().chat("quick", hello, stream=True)
    return "".join([part.message.content async for part in parts])


whole = client.chat("quick", hello, options={"temperature": 0, "num_ctx": 4096}, keep_alive="10m")
streamed = list(client.chat("quick", hello, stream=True))
thought = client.chat("thinker", hello, think=True).message
pieces = [part.message for part in client.chat("thinker", hello, think="low", stream=True)]
asked = client.chat("thinker", hello, tools=[get_weather]).message
result = {"role": "tool", "tool_name": "get_weather", "content": get_weather("Paris")}
by_stream = [
    call for part in client.chat("thinker", hello, tools=[get_weather], stream=True) for call in calls(part.message)
]
seen = client.chat(
    "eyes", [{"role": "user", "content": "What is it?", "images": [base64.b64decode(PIXEL)]}], think=False
)
prompts = list(client.generate("quick", "Hello", system="Be brief.", stream=True))
with tempfile.NamedTemporaryFile() as blob:
    blob.write(b"weights")
    blob.flush()
    refusals = {
        "pull": refused(client.pull, "llama3.2"),
        "pull, streamed": refused(client.pull, "llama3.2", stream=True),
        "push": refused(client.push, "quick"),
        "create": refused(client.create, "mine", from_="quick"),
        "create, streamed": refused(client.create, "mine", from_="quick", stream=True),
        "copy": refused(client.copy, "quick", "mine"),
        "delete": refused(client.delete, "quick"),
        "blob": refused(client.create_blob, blob.name),
    }

json.dump(
    {
        "whole": whole.message.content,
        "streamed": "".join(part.message.content for part in streamed),
        "at_once": asyncio.run(at_once()),
        "figures": [streamed[-1].done_reason, streamed[-1].eval_count > 0, streamed[-1].total_duration > 0],
        "thought": [thought.thinking, thought.content],
        "thought, streamed": [
            "".join(getattr(part, name) or "" for part in pieces) for name in ("thinking", "content")
        ],
        "called": calls(asked),
        "called, streamed": by_stream,
        "told": client.chat("quick", [*hello, asked, result], tools=[get_weather]).message.content,
        "seen": seen.message.content,
        "shaped": json.loads(client.chat("quick", hello, format=SCHEMA).message.content),
        "json": isinstance(json.loads(client.chat("quick", hello, format="json").message.content), dict),
        "prompt": "".join(part.response for part in prompts),
        "limited": client.generate("quick", "Hello", options=ollama.Options(num_predict=2)).done_reason,
        "loaded": client.generate("quick").done_reason,
        "probable": client.chat("quick", hello, logprobs=True).logprobs[0].token,
        "vectors": [len(vector) for vector in client.embed("embed", ["one", "two"], dimensions=8).embeddings],
        "vector": len(client.embeddings("embed", "one").embedding) > 8,
        "listed": sorted(model.model for model in client.list().models),
        "running": "quick:latest" in [model.model for model in client.ps().models],
        "can": client.show("quick").capabilities,
        "context": client.show("quick").modelinfo["llama.context_length"],
        "pulled": [client.pull("quick").status, *[part.status for part in client.pull("quick", stream=True)]],
        "failure": refused(client.chat, "nobody", hello)[0],
        "refused": {name: said and [said[0], "llmux add" in said[1]] for name, said in refusals.items()},
        "unloaded": client.generate("quick", keep_alive=0).done_reason,
    },
    sys.stdout,
)
