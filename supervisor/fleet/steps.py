"""The progress of requests that are computed in steps, such as pictures: a worker reports the steps on its own path."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from supervisor.errors import LlmuxError
from supervisor.host.upstream.upstream import Upstream
from supervisor.schema.request import Step

TIMEOUT_S: Final = 1.0
LIMIT: Final = 64 * 1024


class _StepReport(msgspec.Struct):
    requests: dict[str, Step]


async def steps_of(upstream: Upstream, path: str) -> Mapping[str, Step]:
    """The steps of the worker's running requests, by `x-request-id`; empty if the worker doesn't answer in time."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            response = await upstream.request("GET", path.encode(), [])
            try:
                data = await response.read(LIMIT) if response.status == 200 else b"{}"
            finally:
                response.close()
        return msgspec.json.decode(data, type=_StepReport).requests
    except (TimeoutError, LlmuxError, msgspec.MsgspecError):
        return {}
