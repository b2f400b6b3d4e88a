"""JSON Web Tokens (RFC 7519) as one kind of operation token: signed with HS256, and nothing else.

A token's own header says how it is signed. Whoever makes one could say `none` there, or choose an algorithm that takes a key
for something else. So that header decides nothing: it must say HS256, and the signature is always an HMAC-SHA256.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from pydantic import JsonValue

ALGORITHM: Final = "HS256"
_decode: Final = msgspec.json.Decoder(dict).decode


@dataclass(frozen=True, slots=True)
class Jwt:
    """A token whose signature nobody has looked at yet."""

    claims: Mapping[str, JsonValue]
    signed: bytes
    signature: bytes

    def is_signed(self, key: bytes) -> bool:
        """Did one who has `key` sign it?"""
        return hmac.compare_digest(hmac.digest(key, self.signed, "sha256"), self.signature)


def is_jwt(text: str) -> bool:
    """Three parts with dots between them, which neither JSON nor base64url is."""
    return text.count(".") == 2 and not text.lstrip().startswith("{")


def read(text: str) -> Jwt:
    """The parts of a token. Raises ValueError with what is wrong, also for any algorithm but HS256."""
    try:
        head, payload, signature = (_decoded(part) for part in text.split("."))
        header, claims = _decode(head), _decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError("it looks like a JWT, but its parts are not JSON objects in base64url") from error
    if (said := header.get("alg")) != ALGORITHM:
        raise ValueError(f"its algorithm is {said!r}, and must be {ALGORITHM}")
    if "crit" in header:
        raise ValueError("its header has crit: extensions are not understood here")
    return Jwt(claims, text.rpartition(".")[0].encode(), signature)


def _decoded(part: str) -> bytes:
    return base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
