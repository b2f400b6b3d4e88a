"""The section `clients`: a profile for each client's requests, and limits, which an API key may have as well.

The name of an entry is the name of a tenant. The entry `default` sets keys that the others leave open, and applies to all
clients without an entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, JsonValue, field_validator

from supervisor.catalog.sections.sections import Count, Priority, Section, refuse_routing
from supervisor.core.admission.limits import NO_LIMITS, Rate, TenantLimits

DEFAULT: Final = "default"
_RATE: Final = re.compile(r"([1-9]\d{0,8}) ?(?:req|tokens?)? ?/ ?(s|sec|second|min|minute|h|hour)")
_PERIODS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


@lru_cache(maxsize=1024)
def rate_of(text: str) -> Rate:
    """The rate that a text such as "100req/min", "5/s" or "1000/h" means. Raises ValueError."""
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"expected a rate such as 100/min, 5/s or 1000/h, got {text[:50]!r}")
    return Rate(int(found[1]), _PERIODS[found[2][0]])


def _check_rate(text: object) -> object:
    if isinstance(text, str):
        rate_of(text)
    elif isinstance(text, int) and not isinstance(text, bool):
        raise ValueError(f"expected a rate such as {text}/min, {text}/s or {text}/h, got {text}: say in what time")  # noqa: TRY004
    return text


RateText = Annotated[str, BeforeValidator(_check_rate), Field(json_schema_extra={"pattern": f"^{_RATE.pattern}$"})]


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
        """The limits as the scheduler takes them."""
        if self.request_rate is None and self.token_rate is None and self.concurrency is None:
            return NO_LIMITS  # fast: each request calls this
        requests, tokens = (None if text is None else rate_of(text) for text in (self.request_rate, self.token_rate))
        return TenantLimits(requests, tokens, self.concurrency)


class ClientConfig(Limited):
    """One client's profile."""

    model: str | None = Field(
        default=None,
        min_length=1,
        description="The model of requests that name none, where it serves their path.",
        examples=["qwen"],
    )
    parameters: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Request fields that it doesn't send: set as if it did.",
        examples=[{"temperature": 0.3}],
    )
    priority: Priority | None = Field(
        default=None,
        description="How urgent its requests are that don't say, nor their key does; lower goes first. Default: normal.",
        examples=["low"],
    )
    weight: Annotated[float, Field(ge=0.01, le=100)] = Field(
        default=1.0,
        description="Its share beside other clients of the same class: twice the weight, twice the time of the workers.",
        examples=[2],
    )
    cooldown_errors: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0, description="After so many failed requests in a row it has to pause; 0: never.", examples=[20]
    )
    cooldown_burst: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0,
        description="It may send so many requests at once, and as many in each `cooldown_window_s`; one more, and it has to "
        "pause; 0: any number.",
        examples=[100],
    )
    cooldown_window_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        default=60.0, description="Window of `cooldown_burst`, in seconds."
    )
    cooldown_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        default=30.0, description="How long it has to pause then: its requests get 429 `client_cooldown`."
    )

    @field_validator("parameters")
    @classmethod
    def _llmux_owns_routing(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        refuse_routing(value)
        return value


DEFAULT_CLIENT: Final = ClientConfig()


def filled(clients: Mapping[str, ClientConfig]) -> dict[str, ClientConfig]:
    """The profiles, each with the keys of `default` that it does not set itself."""
    default = clients.get(DEFAULT, DEFAULT_CLIENT)
    return {
        name: default.model_copy(update={key: getattr(client, key) for key in client.model_fields_set})
        for name, client in clients.items()
    }
