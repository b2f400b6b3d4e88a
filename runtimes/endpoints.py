"""The meaning of requests to well-known paths.

A runtime names its endpoints by path. The well-known paths are listed here with their dialect, their role and the place
of their prompt; a runtime with a path of its own gives its `Meaning` along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Role = Literal["run", "count", "other"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of a request, independent of its path."""

    role: Role = "other"  # run: the model answers it; count: it asks for the tokens of such a request
    prompt: str | None = None  # the field that holds the system prompt; None: no prompt is rendered
    dialect: str = "openai"  # the API that the worker speaks there


_RUN: Final = Meaning("run")
_KNOWN: Final[Mapping[str, Meaning]] = {
    "/chat/completions": Meaning("run", "messages"),
    "/chat/completions/input_tokens": Meaning("count", "messages"),
    "/apply-template": Meaning("count", "messages", "llamacpp"),
    "/responses": Meaning("run", "instructions"),
    "/responses/input_tokens": Meaning("count", "instructions"),
    "/messages": Meaning("run", "system", "anthropic"),
    "/messages/count_tokens": Meaning("count", "system", "anthropic"),
    "/completion": Meaning("run", dialect="llamacpp"),
    "/infill": Meaning("run", dialect="llamacpp"),
    "/embedding": Meaning("run", dialect="llamacpp"),
    "/completions": _RUN,
    "/generate": _RUN,
    "/generate_stream": _RUN,
    "/embeddings": _RUN,
    "/rerank": _RUN,
    "/reranking": _RUN,
    "/v2/rerank": _RUN,
    "/audio/speech": _RUN,
    "/audio/transcriptions": _RUN,
    "/audio/translations": _RUN,
    "/images/generations": _RUN,
    "/images/edits": _RUN,
    "/images/variations": _RUN,
}
OTHER: Final = Meaning()

SMALLEST: Final[Mapping[str, Mapping[str, Mapping[str, object]]]] = {
    "llm": {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "."}], "max_tokens": 1},
        "/v1/completions": {"prompt": ".", "max_tokens": 1},
    },
    "embedding": {"/v1/embeddings": {"input": "."}},
    "vision": {"/v1/embeddings": {"input": "."}},
}
"""By type of model and path: a request for which a model computes as little as possible. The best path comes first."""


def aliases_of(path: str) -> tuple[str, ...]:
    """Other paths that mean the same: `/v1/x` is `/x` as well, as with llama.cpp's server. Only OpenAI's well-known paths."""
    bare = path.removeprefix("/v1")
    if bare == path or bare not in _KNOWN or _KNOWN[bare].dialect != "openai":
        return ()
    return (bare, "/v2/rerank") if bare == "/rerank" else (bare,)


def meaning_of(path: str) -> Meaning:
    """The meaning of a request to a well-known path, with or without `/v1`; OTHER for any other path."""
    return _KNOWN.get(path.removeprefix("/v1"), OTHER)
