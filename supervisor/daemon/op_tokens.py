"""Operation tokens: M of N signers agreed to this very operation, a short time ago, and it is carried out once.

A token is `{"opToken": {"operation", "issuedAt", "signers", "nonce", …}, "signature": HEX}`, or its text, plain or in
base64url without line breaks. A signature is the HMAC-SHA256 of the canonical `opToken`: JSON with sorted keys, without blanks,
in UTF-8. With one shared key, `signers` is only a claim of the holder of the key. With a key for each signer, the token has
`signatures` instead, one for each of its signers.

A JSON Web Token (RFC 7519) with the fields of `opToken` as its claims is a token as well. Its one signature is that of the shared key,
or of its one signer. `iat` and `jti` count where `issuedAt` and `nonce` are missing; `exp` and `nbf` count as well. A JWT's own
header names the algorithm. An attacker could write `none` there, or an algorithm that misuses the key. So that header decides
nothing: it must be HS256, and the signature is always an HMAC-SHA256.

Besides those four, `opToken` has every field of the request that has an effect, with the same value; the configuration may
require only the field `modelId`. The log gives the reason for a refused token; so does the response to a client with an API key.

Whether a token was used must not depend on the clock, which may be set back. So when a nonce is forgotten, the expiry time of
its token is kept: tokens with such an expiry time are refused, whatever the clock shows. These times are kept as a few spans;
the nearest spans are merged. If the clock once showed a year far ahead, the times from then are a span of their own,
and tokens with today's times are still accepted.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import itertools
import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog
from pydantic import JsonValue

from supervisor.catalog.sections.governance import GovernanceConfig, read_key
from supervisor.errors import ForbiddenError
from supervisor.host.store.store import Entry, Store

FIELD: Final = "verifiedOpToken"
LATEST_S: Final = 1e15  # of a time in Unix seconds
VALID_S: Final = 300.0
"""A token is valid for this time after it was issued, and clocks may differ by as much."""
NONCE_LENGTH: Final = 8, 256
TOKEN_LIMIT: Final = 64 * 1024
MOST_SPANS: Final = 8
_COLLECTION: Final = "op_nonces"
_FORGOTTEN: Final[Entry] = "op_tokens", "forgotten"
_OWN: Final = frozenset({"operation", "issuedAt", "signers", "nonce"})
_MODEL: Final = frozenset({"modelId"})
_CLAIMS: Final = {"iat": "issuedAt", "jti": "nonce"}
"""The names of claims in a JWT, and our names for them."""
_ALGORITHM: Final = "HS256"
_decode_object: Final = msgspec.json.Decoder(dict).decode

log = structlog.get_logger("llmux.governance")

Json = Mapping[str, JsonValue]
Span = tuple[float, float]
"""The first and the last time of a span."""


class RefusedError(ValueError):
    """The reason why a token is refused. Clients without an API key must not learn it."""


def signed_bytes(op_token: Json) -> bytes:
    """The canonical bytes of `op_token`, as they are signed."""
    return _sorted_json(op_token).encode()


def _sorted_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sign(op_token: Json, key: bytes) -> str:
    """The signature of `op_token` with `key`."""
    return hmac.digest(key, signed_bytes(op_token), "sha256").hex()


def begin(operation: str, fields: Json, signers: Iterable[str], now: float | None = None) -> Json:
    """A token without signatures. Raises RefusedError for a field whose name is one of the token's own."""
    if own := sorted(_OWN & fields.keys()):
        raise RefusedError(f"{', '.join(own)}: the token's own, no field of the request")
    own_fields: dict[str, JsonValue] = {
        "operation": operation,
        "issuedAt": int(time.time() if now is None else now),
        "signers": [*sorted(set(signers))],
        "nonce": secrets.token_urlsafe(24),
    }
    return {"opToken": {**fields, **own_fields}}


def with_signature(token: Json, key: bytes, signer: str | None) -> Json:
    """The token with one more signature: of `signer`, or, for None, of the shared key. Raises RefusedError."""
    op_token = token.get("opToken")
    if not isinstance(op_token, dict):
        raise RefusedError("the token has no opToken")
    if signer is None:
        return {**token, "signature": sign(op_token, key)}
    names, signatures = op_token.get("signers"), token.get("signatures") or {}
    if not isinstance(names, list) or signer not in names or not isinstance(signatures, dict):
        raise RefusedError(f"{signer!r} is not among the signers of the token")
    return {**token, "signatures": {**signatures, signer: sign(op_token, key)}}


def to_text(token: Json) -> str:
    """The token as text."""
    return base64.urlsafe_b64encode(signed_bytes(token)).decode().rstrip("=")


def verify(
    token: JsonValue, config: GovernanceConfig, operation: str, fields: Json, now: float, keys: Callable[[Path], bytes]
) -> tuple[str, float]:
    """Check a token. Returns its nonce and its expiry time (Unix seconds). Raises RefusedError, and any error of `keys`.

    `fields`: the operation's parameters; null and a missing field are the same. `keys` reads a key file.
    """
    is_jwt = isinstance(token, str) and _is_jwt(token)
    op_token = _op_token_of_jwt(str(token), config, now, keys) if is_jwt else _op_token(token, config, keys)
    if op_token.get("operation") != operation:
        raise RefusedError(f"it is for {op_token.get('operation')!r}, not for {operation!r}")
    signed = {name: value for name, value in op_token.items() if name not in _OWN and value is not None}
    requested = {name: value for name, value in fields.items() if value is not None}
    must = requested.keys() & _MODEL if config.signed_fields == "seed" else requested.keys()
    for name in sorted(signed.keys() | must):
        if _sorted_json(signed.get(name)) != _sorted_json(requested.get(name)):  # true is not 1
            signed_value, requested_value = (
                repr(one[name]) if name in one else "left out" for one in (signed, requested)
            )
            raise RefusedError(f"its {name} is {signed_value}, the request's is {requested_value}")
    issued_at = _time_field(op_token, "issuedAt")
    if not now - VALID_S <= issued_at <= now + VALID_S:
        raise RefusedError(f"it was issued {now - issued_at:.0f} s ago, and is good for {VALID_S:.0f} s")
    nonce, (least, most) = op_token.get("nonce"), NONCE_LENGTH
    if not isinstance(nonce, str) or not least <= len(nonce) <= most:
        raise RefusedError(f"its nonce is not a text of {least} to {most} characters")
    return nonce, issued_at + VALID_S


def parse_token(token: JsonValue) -> Json:
    """Parse a token: an object, its text, or its text in base64url. Raises RefusedError."""
    if isinstance(token, str) and len(token) <= TOKEN_LIMIT:
        text = token.strip()
        try:
            token = msgspec.json.decode(
                text
                if text.startswith("{")
                else base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            )
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise RefusedError("it is neither JSON, nor JSON in base64url, nor a JWT") from error
    if not isinstance(token, dict):
        raise RefusedError("there is none" if token is None else "it is not a JSON object")
    return token


def _op_token(token: JsonValue, config: GovernanceConfig, keys: Callable[[Path], bytes]) -> Json:
    """The `opToken` of a token, after a check of its signatures. Raises RefusedError."""
    found = parse_token(token)
    op_token = found.get("opToken")
    if not isinstance(op_token, dict):
        raise RefusedError("it has no opToken")
    _check_signatures(found, op_token, config, _signers(op_token, config), keys)
    return op_token


def _signers(op_token: Json, config: GovernanceConfig) -> frozenset[str]:
    claimed = op_token.get("signers")
    if not isinstance(claimed, list) or not all(isinstance(name, str) for name in claimed):
        raise RefusedError("signers is not a list of names")
    signers = frozenset(str(name) for name in claimed)
    if config.all_signers and not signers <= config.all_signers:
        raise RefusedError(f"{_quoted(signers - config.all_signers)} may not sign")
    if len(signers) < config.required:
        raise RefusedError(f"{len(signers)} signed, {config.required} must")
    return signers


def _check_signatures(
    token: Json, op_token: Json, config: GovernanceConfig, signers: frozenset[str], keys: Callable[[Path], bytes]
) -> None:
    if not config.signer_keys:
        if not _is_signed(token.get("signature"), op_token, keys(config.key_file)):
            raise RefusedError("its signature is wrong")
        return
    signatures = token.get("signatures")
    if not isinstance(signatures, dict):
        raise RefusedError("it has no signatures, one for each signer")
    own = {name: keys(config.signer_keys[name]) for name in sorted(signers)}
    if len(set(own.values())) < len(own):
        raise RefusedError("two of its signers have the same key")
    wrong = [name for name, key in own.items() if not _is_signed(signatures.get(name), op_token, key)]
    if wrong:
        raise RefusedError(f"the signature of {_quoted(wrong)} is wrong")


@dataclass(frozen=True, slots=True)
class _Jwt:
    """A JSON Web Token with an unchecked signature."""

    claims: Mapping[str, JsonValue]
    signed: bytes
    signature: bytes

    def is_signed(self, key: bytes) -> bool:
        """Whether the signature was made with `key`."""
        return hmac.compare_digest(hmac.digest(key, self.signed, "sha256"), self.signature)


def _is_jwt(text: str) -> bool:
    """Whether the text has three parts with dots between them. Neither JSON nor base64url has."""
    return text.count(".") == 2 and not text.lstrip().startswith("{")


def _read_jwt(text: str) -> _Jwt:
    """The parts of a JWT. Raises ValueError with the reason, also for any algorithm but HS256."""
    try:
        head, payload, signature = (_decode_base64(part) for part in text.split("."))
        header, claims = _decode_object(head), _decode_object(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError("it looks like a JWT, but its parts are not JSON objects in base64url") from error
    if (algorithm := header.get("alg")) != _ALGORITHM:
        raise ValueError(f"its algorithm is {algorithm!r}, and must be {_ALGORITHM}")
    if "crit" in header:
        raise ValueError("its header has crit: extensions are not understood here")
    return _Jwt(claims, text.rpartition(".")[0].encode(), signature)


def _decode_base64(part: str) -> bytes:
    return base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)


def _op_token_of_jwt(token: str, config: GovernanceConfig, now: float, keys: Callable[[Path], bytes]) -> Json:
    """The claims of a JWT as the fields of an `opToken`, after a check of its signature. Raises RefusedError."""
    try:
        found = _read_jwt(token.strip())
    except ValueError as error:
        raise RefusedError(str(error)) from error
    signers = _signers(found.claims, config)
    if config.signer_keys and len(signers) != 1:
        raise RefusedError("a JWT has one signature, and each signer must sign: send an opToken with signatures")
    if not found.is_signed(keys(config.signer_keys[next(iter(signers))] if config.signer_keys else config.key_file)):
        raise RefusedError("its signature is wrong")
    claims = dict(found.claims)
    if "exp" in claims and now >= _time_field(claims, "exp"):
        raise RefusedError("it has expired, by its exp")
    if "nbf" in claims and now < _time_field(claims, "nbf"):
        raise RefusedError("it is not good yet, by its nbf")
    given = {_CLAIMS.get(name, name): value for name, value in claims.items() if name not in {"exp", "nbf"}}
    return given | {name: claims[name] for name in _CLAIMS.values() if name in claims}


def _time_field(fields: Json, name: str) -> float:
    """The time in this field, in Unix seconds. Raises RefusedError."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not -LATEST_S < value < LATEST_S:
        raise RefusedError(f"{name} is not a time in seconds")
    return value


def _is_signed(signature: JsonValue, op_token: Json, key: bytes) -> bool:
    try:
        expected = sign(op_token, key)
    except ValueError as error:  # a number that JSON can't express, or a lone surrogate
        raise RefusedError("its opToken can't be written as JSON") from error
    given = signature if isinstance(signature, str) and signature.isascii() else ""
    return hmac.compare_digest(expected, given.lower())


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name[:100]) for name in sorted(names))


class OpTokens:
    """Checks tokens if the configuration requires them. Used nonces survive restarts."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._used: dict[str, float] = {}  # nonce → expiry time of its token
        self._forgotten: list[Span] = []  # expiry times of tokens whose nonces were forgotten
        self._began = 0.0 if store is None else math.floor(store.began)  # tokens have whole seconds
        if store is not None:
            self._used = {nonce: _stored_time(until) for nonce, until in store.items(_COLLECTION).items()}
            times = [_stored_time(each) for each in kept] if isinstance(kept := store.get(*_FORGOTTEN), list) else []
            self._forgotten = [*zip(times[::2], times[1::2], strict=False)]

    async def check(
        self,
        config: GovernanceConfig | None,
        token: JsonValue,
        operation: str,
        fields: Json,
        now: float,
        *,
        names_reason: bool = False,
    ) -> None:
        """Raises ForbiddenError unless the token allows the operation now, NotSavedError if its nonce can't be stored.

        `now`: Unix seconds. None as `config`: everything is allowed. `names_reason`: whether the client may learn the reason.
        """
        if config is None:
            return
        try:
            nonce, good_until = await asyncio.to_thread(verify, token, config, operation, fields, now, read_key)
            await self._use_nonce(nonce, good_until, now)
        except (OSError, ValueError, RecursionError) as error:
            log.warning("op_token.refused", operation=operation, reason=str(error))
            why = f": {error}." if names_reason else "."
            raise ForbiddenError(
                f"The operation token was refused{why}", code="op_token_refused", param=FIELD
            ) from None

    async def _use_nonce(self, nonce: str, good_until: float, now: float) -> None:
        if nonce in self._used:
            raise RefusedError("its nonce was used before")
        if any(first <= good_until <= last for first, last in self._forgotten):
            raise RefusedError("it is as old as tokens whose nonces are forgotten")
        if good_until < self._began + VALID_S:
            raise RefusedError(
                "it was issued before the state that llmux has now, which can't tell whether it was used"
            )
        over = {name: until for name, until in self._used.items() if until < now}
        for name, until in over.items():
            del self._used[name]
            self._forgotten = _with_time(self._forgotten, until)
        self._used[nonce] = good_until  # at once, since another request may arrive during the write
        if self._store is None:
            return
        changed: dict[Entry, JsonValue] = {(_COLLECTION, name): None for name in over}
        changed[_COLLECTION, nonce] = good_until
        changed[_FORGOTTEN] = [*itertools.chain.from_iterable(self._forgotten)]
        async with self._store.transaction() as entries:
            entries.update(changed)


def _with_time(spans: Iterable[Span], time: float) -> list[Span]:
    """The spans with one more time: at most MOST_SPANS, the nearest merged, none within another."""
    joined = sorted([*spans, (time, time)])
    while len(joined) > 1:
        gap, at = min((after[0] - before[1], at) for at, (before, after) in enumerate(itertools.pairwise(joined)))
        if gap > 0 and len(joined) <= MOST_SPANS:
            break
        joined[at : at + 2] = [(joined[at][0], max(joined[at][1], joined[at + 1][1]))]
    return joined


def _stored_time(value: JsonValue) -> float:
    """A time from the store; 0 for any other value."""
    return float(value) if isinstance(value, int | float) else 0.0
