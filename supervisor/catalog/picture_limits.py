"""How many pictures are kept for clients that want their addresses, and how long, as the configuration says it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field


class PicturesConfig(BaseModel):
    """The part of `limits` that says so."""

    pictures_mib: Annotated[int, Field(ge=0, le=1 << 30)] = Field(
        default=256,
        description="Disk for pictures that requests want by address (`response_format: url`); the oldest go first. 0: such "
        "requests are refused.",
    )
    pictures_keep_s: Annotated[float, Field(gt=0, le=31_536_000)] = Field(
        default=3600.0, description="How long such an address holds; at most until the daemon ends."
    )
