"""Who goes first, as the configuration says it."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, Field


class OrderConfig(BaseModel):
    """The part of `limits` that says so."""

    aging_s: Annotated[float, Field(ge=0, le=86_400)] | Literal["never"] = Field(
        default=60.0,
        description="A request that has waited this much longer comes before one of the next higher class (30 points of "
        "priority); `never`: higher classes always go first.",
        examples=[60, "never"],
    )
    overtakes: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=64,
        description="While a model waits for the memory of another one, that one answers at most so many later requests "
        "before it makes room.",
    )

    def numbers(self) -> dict[str, float]:
        """Those that the scheduler takes otherwise than they are written."""
        return {"aging_s": math.inf if self.aging_s == "never" else self.aging_s}
