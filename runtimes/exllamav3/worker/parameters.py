"""The parameters that this worker treats differently from the other language model workers."""

from __future__ import annotations

from typing import Final

from runtimes.sdk.chat import parameters
from runtimes.sdk.parameters import Table, ignored, refused, used

_WHY: Final = "ExLlamaV3 tells probabilities after temperature and truncation only"
_SAMPLING: Final[Table] = {
    "seed": used("same seed, same text, within what arithmetic and other requests allow"),
    "repetition_penalty": used("over prompt and answer, as are the next two"),
}

CHAT: Final[Table] = {
    **parameters.CHAT,
    **_SAMPLING,
    "messages": used("text: one message of the user; the system may speak before it"),
    "logprobs": refused(_WHY, False),
    "top_logprobs": refused(_WHY, 0),
    "tools": refused("there are single turns only, and a tool's result would be another", []),
    "tool_choice": refused("there are no tools here", "none", "auto"),
    "parallel_tool_calls": ignored("there are no tools here"),
    "response_format": refused("this runtime can't hold an answer to a schema", {"type": "text"}),
}

COMPLETIONS: Final[Table] = {**parameters.COMPLETIONS, **_SAMPLING, "logprobs": refused(_WHY, False)}
