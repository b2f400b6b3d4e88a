"""Prompt caches: the directives of requests, and the flushes of operators.

`X-Cache-Mode` is `prefix` (use and keep prompts), `none` (use no prompt of other requests) or `auto` (the worker's default).
`X-Cache-Tag` limits a request to the prompts of requests with the same tag and tenant.

Runtimes support different directives (`runtimes.prompt_cache`): some take a flag for the use of cached prompts, some a *salt*:
only requests with the same salt may use each other's prompts. A flush of such a worker changes the salts, so that prompts cached
before for the flushed requests are never found again. A directive that a worker doesn't support has no effect and is listed in
`x-llmux-ignored`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, Literal, get_args

import structlog
from pydantic import JsonValue

from runtimes.prompt_cache import PromptCache
from supervisor.core.types import ModelId
from supervisor.errors import InvalidRequestError
from supervisor.gateway.head import CACHE_MODE, CACHE_TAG, PRIORITY, TENANT
from supervisor.host.store.store import Entry, NotSavedError, Store
from supervisor.host.upstream.upstream import Headers

log = structlog.get_logger("llmux.cache")

MODE_HEADER: Final = "X-Cache-Mode"
TAG_HEADER: Final = "X-Cache-Tag"
HEADERS: Final = {CACHE_MODE: MODE_HEADER, CACHE_TAG: TAG_HEADER}
_RUNNER_HEADERS: Final = frozenset({PRIORITY, TENANT})
"""Headers that clients of a runner send; these clients read headers about caches in the answer."""
TAG_LIMIT: Final = 64
MOST_FLUSHED: Final = 4096
"""The most flushed models, tenants and tags with a salt of their own."""

Mode = Literal["prefix", "none", "auto"]
Kind = Literal["all", "model", "tenant", "tag"]
_COLLECTION: Final = "salts"
_MODES: Final[tuple[str, ...]] = get_args(Mode)


@dataclass(frozen=True, slots=True)
class CacheDirective:
    """A request's directive for prompt caches."""

    mode: Mode = "auto"
    tag: str = ""


def cache_directive_of(headers: Headers) -> CacheDirective | None:
    """The request's directive; None without these headers and without other headers of a runner. Raises InvalidRequestError."""
    found: dict[str, str] = {}
    is_of_runner = False
    for name, value in headers:
        if (header := HEADERS.get(name)) is not None:
            if header in found:
                raise InvalidRequestError(f"The request has several {header} headers; send one.", param=header)
            found[header] = value.decode("utf-8", "replace").strip()
        elif name in _RUNNER_HEADERS:
            is_of_runner = True
    if found:
        return _parse_directive(found.get(MODE_HEADER, ""), found.get(TAG_HEADER, ""))
    return CacheDirective() if is_of_runner else None


def _parse_directive(mode: str, tag: str) -> CacheDirective:
    mode = mode.lower() or "auto"
    if mode not in _MODES:
        raise InvalidRequestError(
            f"X-Cache-Mode is {', '.join(_MODES[:-1])} or {_MODES[-1]}.", code="invalid_cache_mode", param=MODE_HEADER
        )
    check_tag(tag, TAG_HEADER)
    return CacheDirective(mode, tag)  # type: ignore[arg-type]


def check_tag(tag: str, field: str) -> None:
    """Raises InvalidRequestError for an invalid tag."""
    if len(tag) > TAG_LIMIT or not tag.isprintable():
        raise InvalidRequestError(
            f"{field} must be a text of at most {TAG_LIMIT} characters that can be printed.",
            code="invalid_cache_tag",
            param=field,
        )


@dataclass(frozen=True, slots=True)
class CacheFields:
    """The fields that direct a worker's cache, and the headers that the worker doesn't support."""

    fields: dict[str, JsonValue] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    reuses: bool = True  # may the worker use cached prompts?


NO_FIELDS: Final = CacheFields()


class CacheSalts:
    """The salts that flushes have changed. Use from the event loop's thread."""

    def __init__(self) -> None:
        self.are_any = False  # was anything flushed?
        self._flushed: dict[tuple[str, str], str] = {}  # (kind, name) → a random text
        self._store: Store | None = None

    def restore(self, store: Store) -> None:
        """Load earlier flushes from `store`: workers may outlive an upgraded daemon. Call this once, before any request."""
        self._store = store
        for key, salt in store.items(_COLLECTION).items():
            kind, _, name = key.partition(":")
            if isinstance(salt, str):
                self._flushed[kind, name] = salt
        self.are_any = bool(self._flushed)

    async def rotate(self, kind: Kind, name: str = "") -> None:
        """Flush: later requests of this model, tenant or tag find no prompts of earlier ones. Returns once the flush is saved."""
        changed: dict[Entry, JsonValue] = {}
        if len(self._flushed) >= MOST_FLUSHED:
            changed = {(_COLLECTION, ":".join(each)): None for each in self._flushed}
            self._flushed.clear()  # a new salt for all keeps the flushed prompts unreachable:
            self._flushed["all", ""] = changed[_COLLECTION, "all:"] = secrets.token_hex(8)
        self._flushed[kind, name] = changed[_COLLECTION, f"{kind}:{name}"] = secrets.token_hex(8)
        self.are_any = True
        if self._store is None:
            return
        try:
            async with self._store.transaction() as changes:
                changes.update(changed)
        except NotSavedError as error:
            log.warning("cache.flush_not_saved", reason=error.message)

    def of(self, model: ModelId, tenant: str, tag: str, own_salt: bytes | None) -> str | None:
        """A request's salt; None: no salt is needed. `own_salt`: the request's own salt, as JSON."""
        if not tag and not self.are_any:
            return None
        scopes = (("all", ""), ("model", model), ("tenant", tenant), ("tag", tag))
        flushed = [self._flushed.get(each, "") for each in scopes]
        if not tag and not any(flushed):
            return None
        parts = [*flushed, *((tenant, tag) if tag else ())]
        joined = b"\0".join([*(part.encode() for part in parts), own_salt or b""])
        return sha256(joined).hexdigest()

    def fields(
        self,
        directive: CacheDirective | None,
        cache: PromptCache | None,
        path: str,
        model: ModelId,
        tenant: str,
        own_salt: bytes | None,
    ) -> CacheFields:
        """The fields for a request to the worker's `path`. `cache`: the directives that the model's runtime supports."""
        mode, tag = ("auto", "") if directive is None else (directive.mode, directive.tag)
        controls = cache if cache is not None and path in cache.paths else None
        nothing_kept = cache is not None and not cache.is_kept
        if controls is None:
            headers = ((MODE_HEADER, mode == "prefix" or (mode == "none" and not nothing_kept)), (TAG_HEADER, tag))
            return CacheFields(ignored=tuple(name for name, is_used in headers if is_used), reuses=not nothing_kept)
        fields: dict[str, JsonValue] = {}
        ignored: list[str] = []
        if controls.reuse_field is not None:
            if mode != "auto":
                fields[controls.reuse_field] = mode == "prefix"
        elif mode == "none" and controls.salt_field is not None:
            fields[controls.salt_field] = secrets.token_hex(16)  # no other request has this salt
        if controls.salt_field is None:
            if tag and mode != "none":
                ignored.append(TAG_HEADER)
        elif mode != "none" and (salt := self.of(model, tenant, tag, own_salt)) is not None:
            fields[controls.salt_field] = salt
        return CacheFields(fields, tuple(ignored), reuses=mode != "none")
