"""What a client or a key may ask for: the keys that say it, and the variables that other runners say it by.

`TENANT_RATE_LIMIT_<name>`, `DEFAULT_RATE_LIMIT`, `MAX_QUEUE_DEPTH` and `QUEUE_TIMEOUT_MS` are read as values of `clients` and
`limits`, which come after the files and before `LLMUX_…` variables. The name of a tenant is taken as it stands there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from supervisor.catalog.document import Layer, Leaf, Node, Place, Problem, Source, Table, merge, scalar
from supervisor.catalog.sections import Count, Section
from supervisor.core.limits import Rate, TenantLimits

TENANT: Final = "TENANT_RATE_LIMIT_"
_QUEUE, _WAIT, _DEFAULT = "MAX_QUEUE_DEPTH", "QUEUE_TIMEOUT_MS", "DEFAULT_RATE_LIMIT"

_RATE: Final = re.compile(r"([1-9]\d{0,8}) ?(?:req|tokens?)? ?/ ?(s|sec|second|min|minute|h|hour)")
_PERIODS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


@lru_cache(maxsize=1024)
def rate_of(text: str) -> Rate:
    """What "100req/min", "5/s" or "1000/h" means. Raises ValueError."""
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"expected a rate such as 100/min, 5/s or 1000/h, got {text[:50]!r}")
    return Rate(int(found[1]), _PERIODS[found[2][0]])


def _checked(text: str) -> str:
    rate_of(text)
    return text


RateText = Annotated[str, AfterValidator(_checked), Field(json_schema_extra={"pattern": f"^{_RATE.pattern}$"})]


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
        requests, tokens = (None if text is None else rate_of(text) for text in (self.request_rate, self.token_rate))
        return TenantLimits(requests, tokens, self.concurrency)


def read_variables(environment: Mapping[str, str], cwd: Path) -> tuple[Table, list[Problem]]:
    """What these variables say as a tree whose places are the variables. One that is empty says nothing."""
    root = Table({}, Place(Source(Layer.ENVIRONMENT, "the environment", cwd)))
    problems: list[Problem] = []
    for name, trail in _known(environment):
        text = environment[name].strip()
        place = Place(Source(Layer.ENVIRONMENT, name, cwd))
        node: Node = Leaf(text if trail[0] == "clients" else scalar(text), place)
        if not text:
            continue
        if name == _WAIT:
            if not text.isdecimal():
                problems.append(Problem(place, (), f"expected a whole number of milliseconds, got {text[:50]!r}"))
                continue
            node = Leaf(int(text) / 1000, place)
        for key in reversed(trail):
            node = Table({key: node}, place)
        merged = merge(root, node)
        assert isinstance(merged, Table)
        root = merged
    return root, problems


def _known(environment: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The variables that are set, and where their values belong; of two for one place the later counts."""
    for name, trail in (
        (_QUEUE, ("limits", "queue_total")),
        (_WAIT, ("limits", "queue_wait_s")),
        (_DEFAULT, ("clients", "default", "request_rate")),
    ):
        if name in environment:
            yield name, trail
    for name in sorted(environment):
        if name.startswith(TENANT) and name != TENANT:
            yield name, ("clients", name.removeprefix(TENANT), "request_rate")
