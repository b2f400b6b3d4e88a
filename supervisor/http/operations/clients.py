"""What operators ask about clients, and what keys may not see."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.operation import (
    Example,
    Operation,
    Section,
    anything,
    flag,
    listing,
    mapping,
    named,
    number,
    record,
    request,
    text,
    whole,
)
from supervisor.http.clients import LONGEST_PAUSE_S

_CLIENT: Final = named(
    record(
        {
            "id": text("The tenant."),
            "requests": whole("Inference requests that it sent."),
            "errors": whole(
                "Those that failed: an error response, or one that broke off. Not those that its client or an operator ended."
            ),
            "refused": whole("Those that got no worker: 429, 503 or 504."),
            "prompt_tokens": whole("Tokens in and out, as far as workers told them."),
            "completion_tokens": whole("Tokens in and out, as far as workers told them."),
            "in_flight": whole("Its requests that are queued or running now."),
            "first_seen": number("Seconds since 1970; null if it has not come yet.", null=True),
            "last_seen": number("Seconds since 1970; null if it has not come yet.", null=True),
            "cooldown_s": number("How long it still has to pause, and why; else null.", null=True),
            "cooldown_reason": text("How long it still has to pause, and why; else null.", null=True),
            "profile": mapping(
                anything(),
                "Its [profile](configuration.md#clients), with what `default` fills in; null without one.",
                null=True,
            ),
        }
    ),
    "Client",
)
_ID: Final = "/v1/admin/clients/anna"
_SEEN: Final = {
    "id": "anna",
    "requests": 3,
    "errors": 0,
    "refused": 0,
    "prompt_tokens": 42,
    "completion_tokens": 15,
    "in_flight": 0,
    "first_seen": 1790000000.0,
    "last_seen": 1790000060.0,
    "cooldown_s": None,
    "cooldown_reason": None,
    "profile": None,
}
_NEEDS: Final = "a client"
SECTION: Final = Section(
    "Administration: clients",
    "Who asks: [tenants](#who-asks-and-how-urgently).",
    (
        Operation(
            "GET",
            "/v1/admin/clients",
            "Every tenant that has sent a request since the daemon began.",
            "The last one comes first, then the configured ones that have not. Of those without a profile, the daemon keeps the thousand "
            "that came last.",
            scope="admin",
            answer=listing(_CLIENT),
        ),
        Operation(
            "GET",
            "/v1/admin/clients/{id}",
            "One of them.",
            "404 `client_not_found` if it has neither come nor a profile.",
            scope="admin",
            answer=_CLIENT,
            errors=(404,),
            example=Example(path=_ID, needs=_NEEDS, answer=_SEEN),
        ),
        Operation(
            "PUT",
            "/v1/admin/clients/{id}",
            "Let a client pause from now on.",
            "Its requests get 429 `client_cooldown`, those under way go on. 0 ends its pause.",
            scope="admin",
            request=request({"cooldown_s": number(minimum=0, maximum=LONGEST_PAUSE_S)}, "cooldown_s"),
            answer=_CLIENT,
            errors=(404,),
            example=Example(
                {"cooldown_s": 60},
                path=_ID,
                needs=_NEEDS,
                answer=_SEEN | {"cooldown_s": 60.0, "cooldown_reason": "an operator said so"},
            ),
        ),
        Operation(
            "DELETE",
            "/v1/admin/clients/{id}",
            "Forget what a client did, and its pause. The profile stays.",
            scope="admin",
            answer=record({"id": text(), "forgotten": flag()}),
            errors=(404,),
            example=Example(path=_ID, needs=_NEEDS, answer={"id": "anna", "forgotten": True}),
        ),
    ),
)
