"""Clients: tenants, and their requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from supervisor.schema.operation import doc

_TOKENS = "Tokens in and out, as far as workers told them."
_SEEN = "Seconds since 1970; null if it has not come yet."
_PAUSE = "How long it still has to pause, and why; else null."
LONGEST_PAUSE_S = 86_400


class Client(Struct, gc=False):
    """A tenant, and what it did since the daemon began."""

    id: Annotated[str, doc("The tenant.")]
    requests: Annotated[int, doc("Inference requests that it sent.")]
    errors: Annotated[
        int,
        doc(
            "Those that failed: an error response, or one that broke off. Not those that its client or an operator ended."
        ),
    ]
    refused: Annotated[int, doc("Those that got no worker: 429, 503 or 504.")]
    prompt_tokens: Annotated[int, doc(_TOKENS)]
    completion_tokens: Annotated[int, doc(_TOKENS)]
    in_flight: Annotated[int, doc("Its requests that are queued or running now.")]
    first_seen: Annotated[float | None, doc(_SEEN)]
    last_seen: Annotated[float | None, doc(_SEEN)]
    cooldown_s: Annotated[float | None, doc(_PAUSE)]
    cooldown_reason: Annotated[str | None, doc(_PAUSE)]
    profile: Annotated[
        dict[str, Any] | None,
        doc("Its [profile](configuration.md#clients), with what `default` fills in; null without one."),
    ]


class ClientList(Struct):
    """The last one to come first, then the configured ones that have not come."""

    object: Literal["list"]
    data: list[Client]


class PauseRequest(Struct, forbid_unknown_fields=True):
    """For how long a client has to pause."""

    cooldown_s: Annotated[float, Meta(ge=0, le=LONGEST_PAUSE_S, description="Seconds from now on; 0 ends a pause.")]


class ForgottenClient(Struct):
    """A client that is counted anew."""

    id: str
    forgotten: bool
