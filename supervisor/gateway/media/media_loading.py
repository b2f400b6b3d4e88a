"""Loads the media that prompts refer to, so that workers get the content itself.

The configuration must allow each source. An https address must have a listed host, whose name is resolved once, to public
addresses only; the connection goes to one of exactly these addresses. A redirect is a new address to be checked. The content
must be a picture, a sound or a video, by its declared type and by its first bytes. References, bytes and seconds are limited for
each request, and concurrent loads for the daemon; one request may use a quarter of these. `host.media.media` sends the requests.

Loading begins only after the checks of the request for its model. The request occupies no worker meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from binascii import b2a_base64
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from supervisor.catalog.sections.sections import MediaConfig
from supervisor.errors import InvalidRequestError
from supervisor.gateway.media.media import Reference, refusal
from supervisor.gateway.media.media_address import (
    Address,
    Allowlist,
    is_literal,
    is_public,
    read_address,
    read_file_address,
)
from supervisor.gateway.media.media_type import HEAD, agreed_type
from supervisor.host.media.media import MediaResponse, MediaSource
from supervisor.host.store.request_buffer import BodyBudget, RequestBuffer

log = structlog.get_logger("llmux.media")

REDIRECTS: Final = 3
SHARE: Final = 4
"""One request may use a quarter of the `at_once` concurrent loads, so that its slow addresses don't block other requests."""
_REDIRECT: Final = frozenset({301, 302, 303, 307, 308})
_MAX_QUOTED: Final = 100
_CONFIGURE_HINT: Final = ", or let the operator allow it in server.media"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A reference that may be loaded, and its source."""

    reference: Reference
    source: Address | Path


@dataclass(slots=True)
class Content:
    """Loaded content in base64, and its media type."""

    type: str = ""
    base64: bytearray = field(default_factory=bytearray)


class MediaLoader:
    """The state that all requests share."""

    def __init__(self, config: MediaConfig | None, bodies: BodyBudget, source: MediaSource | None = None) -> None:
        self.config = MediaConfig() if config is None else config
        self.bodies = bodies
        self.hosts = Allowlist(self.config.hosts)
        self.source = source or MediaSource(self.config.ca_file)
        self.places = asyncio.Semaphore(self.config.at_once)
        self.is_on = bool(self.hosts) or self.config.folder is not None  # may anything be loaded?
        self.idle = Loading(self)  # shared by all requests if nothing may be loaded

    def loading(self) -> Loading:
        """The `Loading` for one request."""
        return Loading(self) if self.is_on else self.idle


class Loading:
    """One request's media. Each source is loaded once, even if several candidates get the request in turn."""

    def __init__(self, loader: MediaLoader) -> None:
        self._loader = loader
        self._config = loader.config
        self._contents: dict[Address | Path, Content] = {}
        self._failed: tuple[str, str, str | None] | None = None  # an error's message, code and param
        self._places = asyncio.Semaphore(max(1, loader.config.at_once // SHARE))
        self._size = 0  # bytes of all contents, each counted for every reference
        self.buffer = RequestBuffer(loader.bodies)
        """Counts the bytes of the contents; release this buffer when the contents are no longer needed."""

    @property
    def is_on(self) -> bool:
        """May anything be loaded?"""
        return self._loader.is_on

    def wanted(self, reference: Reference, text: str, before: int) -> Wanted:
        """A reference to load, if allowed. `text` is the whole reference; `before` is the number of references before it.

        Raises InvalidRequestError.
        """
        config, scheme = self._config, text[:8].lower()
        source: Address | Path | None = None
        if config.folder is not None and scheme.startswith("file:"):
            source = read_file_address(text)
            if source is None:
                raise _refused_error(reference, "is no address of a file: file:///PATH, percent-encoded")
        elif self._loader.hosts and scheme.startswith("https:"):
            source = read_address(text)
            if source is None:
                raise _refused_error(
                    reference, "can't be read: https://HOST/PATH in ASCII, percent-encoded, without a user"
                )
            if not self._loader.hosts.allows(source):
                raise _refused_error(
                    reference, f"leads to {source.authority[:_MAX_QUOTED]}, which is not in server.media.hosts"
                )
        if source is None:
            may_be = scheme.startswith(("https:", "file:"))
            raise refusal(reference.key, reference.text, _CONFIGURE_HINT if may_be else "")
        if before >= config.per_request:
            raise InvalidRequestError(
                f"The request refers to more than {config.per_request} media (server.media.per_request).",
                code="media_too_large",
                param=_param_of(reference),
            )
        return Wanted(reference, source)

    async def load(self, wanted: Sequence[Wanted]) -> Mapping[Address | Path, Content]:
        """The contents of all these references, by their sources. Raises InvalidRequestError, UnavailableError."""
        if self._failed is not None:  # for an earlier candidate
            message, code, param = self._failed
            raise InvalidRequestError(message, code=code, param=param)
        times = Counter(one.source for one in wanted)
        missing = {one.source: one.reference for one in wanted if one.source not in self._contents}
        loads = [
            asyncio.create_task(self._load_source(source, reference, times[source]))
            for source, reference in missing.items()
        ]
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await asyncio.gather(*loads)  # a TaskGroup would keep its errors in a reference cycle
        except TimeoutError as error:
            message = f"The request's media took longer than {self._config.timeout_s:g} s (server.media.timeout_s)."
            self._failed = message, "media_unreachable", None
            raise InvalidRequestError(message, code="media_unreachable") from error
        except InvalidRequestError as error:
            self._failed = error.message, error.code, error.param
            raise
        finally:
            while loads:
                loads.pop().cancel()
        return self._contents

    async def _load_source(self, source: Address | Path, reference: Reference, times: int) -> None:
        # The canceller doesn't wait for this task. A task that kept the error would be in a reference cycle with its traceback.
        with contextlib.suppress(asyncio.CancelledError):
            async with self._places, self._loader.places:
                if isinstance(source, Address):
                    self._contents[source] = content = await self._fetch(source, reference, times)
                else:
                    self._contents[source] = content = await self._read_file(source, reference, times)
            where = source.authority if isinstance(source, Address) else "file"
            log.debug("media.loaded", source=where, type=content.type, base64_bytes=len(content.base64))

    async def _read_file(self, path: Path, reference: Reference, times: int) -> Content:
        assert self._config.folder is not None
        try:
            file = await self._loader.source.file(self._config.folder, path)
            self._count_bytes(file.size * times, reference)  # before anything is read
            return await self._read_content(file, None, reference, 0)
        except PermissionError as error:
            raise _refused_error(reference, "is no file below server.media.folder that llmux may read") from error
        except OSError as error:
            raise _unreachable_error(reference, "The file can't be read: check its path") from error

    async def _fetch(self, address: Address, reference: Reference, times: int) -> Content:
        for _ in range(REDIRECTS + 1):
            try:
                addresses = await self._resolve(address, reference)
                answer = self._loader.source.response(
                    address.host, address.authority, addresses, address.port, address.target
                )
                async with answer as response:
                    if response.status not in _REDIRECT or response.location is None:
                        return await self._read_response(address, response, reference, times)
                    following = address.redirected(response.location)
            except OSError as error:
                raise _unreachable_error(reference, f"{address.authority[:_MAX_QUOTED]}: {error.strerror}") from error
            if following is None or not self._loader.hosts.allows(following):
                raise _refused_error(reference, "is redirected to an address that is not in server.media.hosts")
            address = following
        raise _unreachable_error(reference, f"There are more than {REDIRECTS} redirects")

    async def _resolve(self, address: Address, reference: Reference) -> Sequence[str]:
        """The IP addresses for the connection. Raises OSError, InvalidRequestError."""
        if is_literal(address.host):
            return [address.host]  # the list of hosts has this address
        try:
            found = await self._loader.source.addresses(address.host, address.port)
        except OSError as error:
            raise _unreachable_error(reference, f"{address.host[:_MAX_QUOTED]} is not known") from error
        if not all(map(is_public, found)):
            raise _refused_error(reference, f"leads to {address.host[:_MAX_QUOTED]}, whose IP address is not public")
        return found

    async def _read_response(
        self, address: Address, response: MediaResponse, reference: Reference, times: int
    ) -> Content:
        where = address.authority[:_MAX_QUOTED]
        if response.status != 200:
            raise _unreachable_error(reference, f"{where} answers HTTP {response.status}")
        if response.content_encoding not in ("", "identity"):
            raise _unsupported_error(reference, f"{where} sends it compressed, by Content-Encoding")
        if response.content_length is not None and response.content_length > self._max_bytes:
            raise self._too_large_error(reference)
        return await self._read_content(response.pieces, response.content_type, reference, times)

    async def _read_content(
        self, pieces: AsyncIterator[bytes], declared: str | None, reference: Reference, times: int
    ) -> Content:
        """Read the content in these pieces. `times`: each byte counts so often, once for each reference; 0: already counted."""
        content, rest = Content(), b""
        async for piece in pieces:
            self._count_bytes(len(piece) * times, reference)
            rest += piece
            if not content.type and len(rest) >= HEAD:
                content.type = _checked_type(declared, rest, reference)
            whole = len(rest) - len(rest) % 3
            if content.type:
                content.base64 += b2a_base64(rest[:whole], newline=False)
                rest = rest[whole:]
        content.type = content.type or _checked_type(declared, rest, reference)
        content.base64 += b2a_base64(rest, newline=False)
        return content

    def _count_bytes(self, size: int, reference: Reference) -> None:
        """Count more bytes. Raises InvalidRequestError, UnavailableError."""
        self._size += size
        if self._size > self._max_bytes:
            raise self._too_large_error(reference)
        self.buffer.grow(self._size * 4 // 3)

    @property
    def _max_bytes(self) -> int:
        return self._config.size_mib << 20

    def _too_large_error(self, reference: Reference) -> InvalidRequestError:
        return InvalidRequestError(
            f"The request's media are larger than {self._config.size_mib} MiB together (server.media.size_mib).",
            code="media_too_large",
            param=_param_of(reference),
        )


NOTHING: Final = MediaLoader(None, BodyBudget()).loading()
"""The `Loading` of a request that contains all of its media itself."""


def _checked_type(declared: str | None, head: bytes, reference: Reference) -> str:
    found = agreed_type(declared, head[:HEAD])
    if found is None:
        raise _unsupported_error(
            reference, "It is not a picture, a sound or a video, or not what its Content-Type says"
        )
    return found


def _param_of(reference: Reference) -> str:
    return reference.key[:50]


def _refused_error(reference: Reference, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{_param_of(reference)} {why}. Send the content itself, as data:<type>;base64,<content>.",
        code="remote_media_refused",
        param=_param_of(reference),
    )


def _unreachable_error(reference: Reference, why: str) -> InvalidRequestError:
    message = f"{_param_of(reference)} could not be loaded. {why}."
    return InvalidRequestError(message, code="media_unreachable", param=_param_of(reference))


def _unsupported_error(reference: Reference, why: str) -> InvalidRequestError:
    message = f"{_param_of(reference)} can't be used. {why}."
    return InvalidRequestError(message, code="media_type_unsupported", param=_param_of(reference))
