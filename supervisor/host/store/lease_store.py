"""Leases of device memory in Redis, by which several coordinators share the same devices.

The documentation of leases has the protocol.

A device is a hash, `llmux:leases:DEVICE`; each of its fields is a holder, and the value `MIB EXPIRES`, in MiB and milliseconds
of Redis' own clock. Everything is done by two scripts, so that nothing happens between reading and changing a hash, and no
machine's clock matters. Devices are taken in the order of their names, all or none.

A Redis that was restarted may have forgotten everything. The key `llmux:leases` holds the time of its start, and for the first
ten seconds Redis gives no new leases, so that all holders can renew theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from supervisor.errors import ConfigError

BEGUN: Final = "llmux:leases"
PREFIX: Final = f"{BEGUN}:"
TIMEOUT_S: Final = 2.0
JUST_BEGUN: Final = "the lease store has just begun: others may still have to tell it what they have"

TAKE: Final = """\
-- KEYS: llmux:leases, then the devices. ARGV: holder, milliseconds to live, 1 if it has its lease already (else 0), then for
-- each device: MiB to lease, MiB that all may lease. Takes or renews all of them and returns 0; or changes nothing and returns
-- the number of the device that is full, or -1: Redis has just begun, and others have yet to say what they have.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[1], string.format('%.0f', now), 'NX')
if ARGV[3] == '0' and now < redis.call('GET', KEYS[1]) + 10000 then
  return -1
end
for number = 1, #KEYS - 1 do
  local key, mine = KEYS[number + 1], false
  local wanted = tonumber(ARGV[2 * number + 2])
  local leased, fields = wanted, redis.call('HGETALL', key)
  for at = 1, #fields, 2 do
    local mib, expires = string.match(fields[at + 1], '^(%d+) (%d+)$')
    if not mib or tonumber(expires) <= now then
      redis.call('HDEL', key, fields[at])
    elseif fields[at] == ARGV[1] then
      mine = tonumber(mib) >= wanted
    else
      leased = leased + tonumber(mib)
    end
  end
  if not mine and leased > tonumber(ARGV[2 * number + 3]) then
    return number
  end
end
for number = 1, #KEYS - 1 do
  redis.call('HSET', KEYS[number + 1], ARGV[1], ARGV[2 * number + 2] .. ' ' .. string.format('%.0f', now + ARGV[2]))
end
return 0
"""

LOOK: Final = """\
-- KEYS: llmux:leases, then the devices. Returns the milliseconds until new leases can be had (0: now), then for each device a
-- list: holder, MiB, holder, MiB, and so on, without what has expired.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[1], string.format('%.0f', now), 'NX')
local seen = {math.max(0, redis.call('GET', KEYS[1]) + 10000 - now)}
for number = 2, #KEYS do
  local held, fields = {}, redis.call('HGETALL', KEYS[number])
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


class StoreUnreachableError(Exception):
    """Redis doesn't answer, or not as Redis. No request fails because of this alone."""


@dataclass(frozen=True, slots=True)
class Share:
    """A holder's part of a device, and how much all holders together may lease there."""

    mib: int
    most_mib: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason for refusing a lease: the device `full` is full, or, where `full` is None, the store has just begun."""

    full: str | None

    def __str__(self) -> str:
        return JUST_BEGUN if self.full is None else f"others have leased the memory of {self.full} in the lease store"


class LeaseStore:
    """A connection to Redis, made at the first use and again after it broke. Every call takes seconds at most.

    Every call raises StoreUnreachableError.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError for an address that can't be used at all."""
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

    async def take(
        self, holder: str, shares: Mapping[str, Share], ttl_s: float, *, has_it: bool = False
    ) -> Refusal | None:
        """Lease all of the devices, or renew the leases. Returns None, or, if nothing was changed, the reason.

        `has_it`: the holder has the memory already, whether the store remembers it or not.
        """
        devices = sorted(shares)
        amounts = [amount for device in devices for amount in (shares[device].mib, shares[device].most_mib)]
        try:
            args: list[str | int] = [holder, int(ttl_s * 1000), int(has_it), *amounts]
            full = int(await self._take(keys=[BEGUN, *_keys_of(devices)], args=args))
        except self._trouble as error:
            raise _unreachable_error(error) from error
        return None if full == 0 else Refusal(None if full < 0 else devices[full - 1])

    async def look(self, devices: Sequence[str]) -> tuple[bool, dict[str, dict[str, int]]]:
        """Whether the store gives new leases yet, and the MiB that each holder has of each device."""
        try:
            left_ms, *seen = await self._look(keys=[BEGUN, *_keys_of(devices)], args=[])
        except self._trouble as error:
            raise _unreachable_error(error) from error
        return int(left_ms) == 0, {
            device: {
                holder.decode(errors="replace"): int(mib) for holder, mib in zip(shares[::2], shares[1::2], strict=True)
            }
            for device, shares in zip(devices, seen, strict=True)
        }

    async def release(self, holder: str, devices: Sequence[str]) -> None:
        """Give back the holder's leases of these devices."""
        try:
            for key in _keys_of(devices):
                await self._redis.hdel(key, holder)
        except self._trouble as error:
            raise _unreachable_error(error) from error

    async def close(self) -> None:
        """End the connection."""
        await self._redis.aclose()


def _keys_of(devices: Sequence[str]) -> list[str]:
    return [PREFIX + device for device in devices]


def _unreachable_error(error: BaseException) -> StoreUnreachableError:
    return StoreUnreachableError(f"the lease store can't be reached ({str(error) or type(error).__name__})")
