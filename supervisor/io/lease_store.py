"""Leases of device memory in Redis: what several coordinators on the same devices agree on. docs/leases.md has the protocol.

A device is a hash, `llmux:leases:DEVICE`; each of its fields is a holder, and the value `MIB EXPIRES`, in MiB and milliseconds
of Redis' own clock. Everything is done by two scripts, so that nothing happens between a look and a change, and no clock of
a machine matters. Devices are taken in the order of their names, all or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from supervisor.errors import ConfigError, LlmuxError

PREFIX: Final = "llmux:leases:"
TIMEOUT_S: Final = 2.0

TAKE: Final = """\
-- KEYS: the devices. ARGV: holder, milliseconds to live, then for each device: MiB to lease, MiB that all may lease.
-- Takes or renews all of them and returns 0; or changes nothing and returns the number of the device that is full.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for number, key in ipairs(KEYS) do
  local leased, mine, fields = tonumber(ARGV[2 * number + 1]), false, redis.call('HGETALL', key)
  for at = 1, #fields, 2 do
    local mib, expires = string.match(fields[at + 1], '^(%d+) (%d+)$')
    if not mib or tonumber(expires) <= now then
      redis.call('HDEL', key, fields[at])
    elseif fields[at] == ARGV[1] then
      mine = tonumber(mib) >= tonumber(ARGV[2 * number + 1])
    else
      leased = leased + tonumber(mib)
    end
  end
  if not mine and leased > tonumber(ARGV[2 * number + 2]) then
    return number
  end
end
for number, key in ipairs(KEYS) do
  redis.call('HSET', key, ARGV[1], ARGV[2 * number + 1] .. ' ' .. string.format('%.0f', now + ARGV[2]))
end
return 0
"""

LOOK: Final = """\
-- KEYS: the devices. Returns for each a list: holder, MiB, holder, MiB, and so on, without what has expired.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local seen = {}
for number, key in ipairs(KEYS) do
  local held, fields = {}, redis.call('HGETALL', key)
  for at = 1, #fields, 2 do
    local mib, expires = string.match(fields[at + 1], '^(%d+) (%d+)$')
    if mib and tonumber(expires) > now then
      held[#held + 1] = fields[at]
      held[#held + 1] = tonumber(mib)
    end
  end
  seen[number] = held
end
return seen
"""


class StoreUnreachableError(LlmuxError):
    """Redis doesn't answer, or not as Redis."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "lease_store_unreachable"


@dataclass(frozen=True, slots=True)
class Share:
    """What a holder leases of a device, and how much all may lease there."""

    mib: int
    most_mib: int


class LeaseStore:
    """A connection to Redis, made when it is first needed, and again whenever it broke. Every call takes seconds at most.

    Each raises StoreUnreachableError.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError for what can't be used at all."""
        try:
            from redis.asyncio import Redis  # noqa: PLC0415  # an extra, and 0.1 s that only daemons with a store pay
            from redis.exceptions import RedisError  # noqa: PLC0415
        except ImportError as error:
            remedy = "its client isn't installed; pip install 'llmux-supervisor[redis]'"
            raise ConfigError((f"server.leases: {remedy}",)) from error
        try:
            self._redis: Any = Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        except ValueError as error:
            raise ConfigError((f"server.leases: {error}",)) from error
        self._trouble = (RedisError, OSError, TimeoutError)
        self._take = self._redis.register_script(TAKE)
        self._look = self._redis.register_script(LOOK)

    async def take(self, holder: str, shares: Mapping[str, Share], ttl_s: float) -> str | None:
        """Lease all of the devices, or renew them. None; or the device that is full, and nothing has changed."""
        devices = sorted(shares)
        amounts = [amount for device in devices for amount in (shares[device].mib, shares[device].most_mib)]
        try:
            full = await self._take(keys=_keys(devices), args=[holder, int(ttl_s * 1000), *amounts])
        except self._trouble as error:
            raise _unreachable(error) from error
        return devices[int(full) - 1] if full else None

    async def look(self, devices: Sequence[str]) -> dict[str, dict[str, int]]:
        """Who holds how many MiB of each device."""
        try:
            seen = await self._look(keys=_keys(devices), args=[])
        except self._trouble as error:
            raise _unreachable(error) from error
        return {
            device: {
                holder.decode(errors="replace"): int(mib) for holder, mib in zip(held[::2], held[1::2], strict=True)
            }
            for device, held in zip(devices, seen, strict=True)
        }

    async def release(self, holder: str, devices: Sequence[str]) -> None:
        """Give back what it has of these devices."""
        try:
            for key in _keys(devices):
                await self._redis.hdel(key, holder)
        except self._trouble as error:
            raise _unreachable(error) from error

    async def close(self) -> None:
        """End the connection."""
        await self._redis.aclose()


def _keys(devices: Sequence[str]) -> list[str]:
    return [PREFIX + device for device in devices]


def _unreachable(error: BaseException) -> StoreUnreachableError:
    return StoreUnreachableError(f"the lease store can't be reached ({str(error) or type(error).__name__})")
