"""The fields of a request, with one getter per type. Each error names the field and the expected value.

`null` counts as missing, as OpenAI's clients mean it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TypeVar, overload

from starlette.requests import Request

from runtimes.sdk.errors import WorkerError

T = TypeVar("T", bound=str)
MAX_JSON_BYTES = 256 << 20


async def read_limited(request: Request, most: int) -> AsyncGenerator[bytes, None]:
    """The body in chunks, as it arrives. Raises WorkerError beyond `most` bytes."""
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise WorkerError("The body is too large.", code="request_too_large", status=413)
        yield piece


class Body:
    """A JSON object, or the text fields of a form (with numbers and booleans as text)."""

    def __init__(self, values: Mapping[str, object], *, form: bool = False) -> None:
        self.values = values
        self._form = form

    @classmethod
    async def parse(cls, request: Request) -> Body:
        """Parse a request's JSON. Raises WorkerError unless it is an object."""
        data = bytearray()
        async for piece in read_limited(request, MAX_JSON_BYTES):
            data += piece
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise WorkerError(f"The body is not JSON: {error}.", code="invalid_json") from error
        if not isinstance(values, dict):
            raise WorkerError("The body must be a JSON object.", code="invalid_json")
        return cls(values)

    @overload
    def text(self, name: str, default: str) -> str: ...
    @overload
    def text(self, name: str, default: None = None) -> str | None: ...
    def text(self, name: str, default: str | None = None) -> str | None:
        """A string, or `default` if missing."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong_value(name, "a string")
        return value

    def required_text(self, name: str) -> str:
        """A required string that isn't empty."""
        value = self.text(name)
        if value is None or not value.strip():
            raise WorkerError(f"{name} is needed, and must not be empty.", param=name, code="missing_parameter")
        return value

    @overload
    def number(self, name: str, default: float, low: float = ..., high: float = ...) -> float: ...
    @overload
    def number(self, name: str, default: None = None, low: float = ..., high: float = ...) -> float | None: ...
    def number(
        self, name: str, default: float | None = None, low: float = -math.inf, high: float = math.inf
    ) -> float | None:
        """A finite number from `low` to `high`, inclusive."""
        value = self.values.get(name)
        if value is None or (self._form and value == ""):
            return default
        if self._form and isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self.wrong_value(name, "a number") from None
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self.wrong_value(name, "a number")
        if not low <= value <= high:
            least, most = _format_bound(low), _format_bound(high)
            bound = f"at least {least}" if value < low else f"at most {most}"
            raise self.wrong_value(name, f"from {least} to {most}" if high < 1 << 62 else bound)
        return value

    @overload
    def integer(self, name: str, default: int, low: int = ..., high: int = ...) -> int: ...
    @overload
    def integer(self, name: str, default: None = None, low: int = ..., high: int = ...) -> int | None: ...
    def integer(self, name: str, default: int | None = None, low: int = -(1 << 63), high: int = 1 << 63) -> int | None:
        """A whole number from `low` to `high`, inclusive."""
        value = self.number(name, default, low, high)
        if value is None:
            return None
        if value != int(value):
            raise self.wrong_value(name, "a whole number")
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean, or `default` if missing."""
        value = self.values.get(name)
        if value is None:
            return default
        if self._form and isinstance(value, str) and value.lower() in {"true", "1", "false", "0"}:
            return value.lower() in {"true", "1"}
        if not isinstance(value, bool):
            raise self.wrong_value(name, "true or false")
        return value

    def choice(self, name: str, choices: Sequence[T], default: T) -> T:
        """One of `choices`, or `default` if missing."""
        value = self.values.get(name)
        if value is None:
            return default
        for choice in choices:
            if value == choice:
                return choice
        raise self.wrong_value(name, f"one of {', '.join(choices)}")

    def texts(self, name: str, most: int) -> list[str]:
        """A string, or a list of at most `most` strings; empty if missing."""
        value = self.values.get(name)
        if value is None:
            return []
        values = value if isinstance(value, list) else [value]
        texts = [item for item in values if isinstance(item, str)]
        if len(values) > most or len(texts) < len(values):
            raise self.wrong_value(name, f"a string or a list of at most {most} strings")
        return texts

    def wrong_value(self, name: str, expected: str) -> WorkerError:
        """The error for a field with a wrong value."""
        shown = repr(self.values.get(name))
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return WorkerError(f"{name} is {shown}, but must be {expected}.", param=name)


def _format_bound(bound: float) -> str:
    """The bound as text. Whole numbers keep all of their digits."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
