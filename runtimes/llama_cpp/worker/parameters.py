"""The parameters that this worker treats differently from the other language model workers."""

from __future__ import annotations

from typing import Final

from runtimes.sdk.chat import parameters
from runtimes.sdk.parameters import Table, refused, used

_SAMPLING: Final[Table] = {
    "temperature": used("0: always the likeliest token. Default: 1"),
    "top_p": used("default: 1"),
    "top_k": used("0 or -1: off, as by default"),
    "min_p": used("default: 0"),
    "repetition_penalty": used("over the last 64 tokens of the answer, as are the next two"),
    "cache_prompt": used(
        "false: nothing that was read for an earlier prompt is used; default: what both begin with is"
    ),
    "seed": used("same seed, same text, on the same machine"),
}

CHAT: Final[Table] = {
    **parameters.CHAT,
    **_SAMPLING,
    "messages": used("text"),
    "tools": used("functions, for models whose chat template knows tools; the model decides whether it calls one"),
    "tool_choice": refused("the model decides here whether it calls a tool", "none", "auto"),
    "response_format": refused("this runtime can't hold an answer to a schema; llama_server can", {"type": "text"}),
}

COMPLETIONS: Final[Table] = {**parameters.COMPLETIONS, **_SAMPLING}
