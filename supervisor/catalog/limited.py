"""What a client or a key may ask for, as the configuration says it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Final

from pydantic import BeforeValidator, Field

from supervisor.catalog.sections import Count, Section
from supervisor.core.limits import NO_LIMITS, Rate, TenantLimits

_RATE: Final = re.compile(r"([1-9]\d{0,8}) ?(?:req|tokens?)? ?/ ?(s|sec|second|min|minute|h|hour)")
_PERIODS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


@lru_cache(maxsize=1024)
def rate_of(text: str) -> Rate:
    """What "100req/min", "5/s" or "1000/h" means. Raises ValueError."""
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"expected a rate such as 100/min, 5/s or 1000/h, got {text[:50]!r}")
    return Rate(int(found[1]), _PERIODS[found[2][0]])


def _checked(text: object) -> object:
    if isinstance(text, str):
        rate_of(text)
    elif isinstance(text, int) and not isinstance(text, bool):
        raise ValueError(f"expected a rate such as {text}/min, {text}/s or {text}/h, got {text}: say in what time")  # noqa: TRY004
    return text


RateText = Annotated[str, BeforeValidator(_checked), Field(json_schema_extra={"pattern": f"^{_RATE.pattern}$"})]


class Limited(Section):
    """The limits of one client, or of one key."""

    request_rate: RateText | None = Field(
        default=None,
        description="Requests it may send: `100/min`, `5/s`, `1000/h`. One more gets 429 `rate_limit_exceeded`.",
        examples=["100/min"],
    )
    token_rate: RateText | None = Field(
        default=None,
        description="Tokens that its requests may take, in and out. They are counted once an answer has ended.",
        examples=["50000/min"],
    )
    concurrency: Count | None = Field(
        default=None, description="Requests it may have waiting and running at once.", examples=[4]
    )

    @property  # not a cached one: `default` is copied to fill in what the others leave open
    def tenant_limits(self) -> TenantLimits:
        """As the scheduler takes them."""
        if self.request_rate is None and self.token_rate is None and self.concurrency is None:
            return NO_LIMITS  # each request comes here
        requests, tokens = (None if text is None else rate_of(text) for text in (self.request_rate, self.token_rate))
        return TenantLimits(requests, tokens, self.concurrency)
