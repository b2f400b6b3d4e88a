"""What OpenAI's clients send and get, as far as llmux reads or describes it; a worker's server defines the rest."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from supervisor.gateway.body.typed import Sent
from supervisor.schema.operation import doc


class ForLlmux(Sent, kw_only=True):
    """Fields of every JSON request to a model that are for llmux. No worker gets them."""

    allow_remote: (
        Annotated[
            bool, doc("May the request leave this machine? A [remote](runtimes.md#openai_remote) model needs it.")
        ]
        | UnsetType
    ) = UNSET
    x_priority: Annotated[
        Literal["high", "normal", "low"] | Annotated[int, Meta(ge=0, le=100)] | UnsetType,
        doc("How urgent it is; lower goes first."),
    ] = UNSET
    x_client_id: Annotated[str, doc("Who asks: the tenant.", max_length=64, pattern="^[ -~]*$")] | UnsetType = UNSET
    x_timeout_s: Annotated[float, doc("Within how many seconds the answer must come.", gt=0, le=86400)] | UnsetType = (
        UNSET
    )
    x_keep_alive_s: (
        Annotated[float, doc("For how long the model stays loaded after it, at least.", ge=0, le=86400)] | UnsetType
    ) = UNSET
