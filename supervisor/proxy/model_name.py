"""The name that a client asked for, in answers that carry another one.

Behind a public name is a model whose worker has a name of its own, and writes that into its answers. Answers are not
parsed for it: `"model":"its-name"` is replaced where it stands. Text that a model generated can't look like that, because
quotes within a JSON string are escaped. The arguments of a tool can, in Anthropic's whole answers: so of those, and of every
other answer that isn't a stream, only the outermost `model` is replaced.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from supervisor.io.upstream import Headers, UpstreamResponse
from supervisor.proxy.dialect import STREAMS

_TYPES: Final = (b"application/json", *STREAMS)
_WHOLE_LIMIT: Final = 1024 * 1024  # what is larger is pictures or sound
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_REPLACED: Final = (b"content-length", b"etag")  # another name may be longer


class Renaming(NamedTuple):
    """What is replaced by what. Both ways to write it: with a space after the colon, and without."""

    found: tuple[bytes, bytes]
    put: tuple[bytes, bytes]

    def of(self, piece: bytes) -> bytes:
        """`piece` with the asked name."""
        return piece.replace(self.found[0], self.put[0]).replace(self.found[1], self.put[1])

    def of_whole(self, body: bytes) -> bytes:
        """A whole answer with the asked name."""
        try:
            fields = _fields(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return self.of(body)
        name = fields.get("model")
        if name is None or b'"model":' + bytes(name) != self.found[0]:
            return body
        fields["model"] = msgspec.Raw(self.put[0].removeprefix(b'"model":'))
        return msgspec.json.encode(fields)

    def begun(self, piece: bytes) -> int:
        """How many bytes at the end of `piece` may be the beginning of what is replaced."""
        if piece.endswith((b"\n", b"}")):
            return 0
        longest = min(len(piece), len(self.found[1]) - 1)
        return next((size for size in range(longest, 0, -1) if self._begins_with(piece[-size:])), 0)

    def _begins_with(self, end: bytes) -> bool:
        return any(found.startswith(end) for found in self.found)


@lru_cache(1024)
def renaming(theirs: str, asked: str) -> Renaming:
    """`asked` for `theirs`."""
    found, put = (msgspec.json.encode(name) for name in (theirs, asked))
    return Renaming((b'"model":' + found, b'"model": ' + found), (b'"model":' + put, b'"model": ' + put))


class RenamedResponse:
    """A worker's response with the asked name in it; see `io.upstream.UpstreamResponse`."""

    def __init__(self, response: UpstreamResponse, names: Renaming, *, is_whole: bool = False) -> None:
        self.status = response.status
        self.headers: Headers = [item for item in response.headers if item[0] not in _REPLACED]
        self.drained = False
        self._response = response
        self._names = names
        self._is_whole = is_whole
        self._begun = b""  # of a piece that ended within what is replaced

    @classmethod
    def of(cls, response: UpstreamResponse, names: Renaming, content_type: bytes) -> UpstreamResponse:
        """`response`, where it can carry a name."""
        if not content_type.startswith(_TYPES):
            return response
        return cls(response, names, is_whole=content_type.partition(b";")[0].strip() == _TYPES[0])

    async def next_chunk(self) -> bytes:
        """The next piece that is not empty, or the last one."""
        piece = b""
        while self._is_whole:
            self._begun += await self._response.next_chunk()
            self.drained = self._response.drained
            self._is_whole = len(self._begun) <= _WHOLE_LIMIT
            if self.drained:
                return self._names.of_whole(self._begun) if self._is_whole else self._names.of(self._begun)
        while not piece and not self.drained:
            piece = self._names.of(self._begun + await self._response.next_chunk())
            self.drained = self._response.drained
            begun = 0 if self.drained else self._names.begun(piece)
            self._begun = piece[len(piece) - begun :]
            piece = piece[: len(piece) - begun]
        return piece

    async def read(self, limit: int) -> bytes:
        """As in UpstreamResponse."""
        body = await self._response.read(limit)
        return self._names.of_whole(body) if self._is_whole else self._names.of(body)

    def close(self) -> None:
        """Let go of the worker's response."""
        self._response.close()
