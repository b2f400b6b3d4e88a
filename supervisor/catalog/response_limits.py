"""How many responses are kept for clients that refer to them later, and how long, as the configuration says it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field


class ResponsesConfig(BaseModel):
    """The part of `limits` that says so."""

    responses_mib: Annotated[int, Field(ge=0, le=1 << 30)] = Field(
        default=256,
        description="Disk for responses that `previous_response_id` and `GET /v1/responses/ID` find again; the oldest go "
        "first. 0: none is kept.",
    )
    responses_most: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        default=10_000, description="So many responses are kept at most; the oldest go first."
    )
    responses_keep_s: Annotated[float, Field(gt=0, le=315_360_000)] = Field(
        default=2_592_000.0, description="How long a response is kept, in seconds; 30 days by default."
    )
