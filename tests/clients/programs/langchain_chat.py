"""LangChain: chat, a stream, a tool call, and embeddings, which it asks for as token ids unless told otherwise."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

address = {"base_url": f"{sys.argv[1]}/v1", "api_key": "any", "max_retries": 0}


@tool
def get_weather(city: str) -> str:
    """Tell the weather."""
    return f"It is sunny in {city}."


chat = ChatOpenAI(model="quick", **address)
called = chat.bind_tools([get_weather]).invoke("What is the weather in Paris?")
vectors = OpenAIEmbeddings(model="embed", check_embedding_ctx_length=False, **address).embed_documents(["one", "two"])

json.dump(
    {
        "whole": chat.invoke("Hello").content,
        "streamed": "".join(piece.content for piece in chat.stream("Hello")),
        "called": [[call["name"], call["args"]] for call in called.tool_calls],
        "vectors": [len(vector) > 0 for vector in vectors],
    },
    sys.stdout,
)
