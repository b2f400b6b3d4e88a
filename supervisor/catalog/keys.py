"""API keys with their scopes and expiry.

`api_keys.yaml` is a list of keys, read as strictly as the configuration. Only SHA-256 digests stay in memory, and a
credential is compared with all of them in constant time. Generated keys have 256 random bits, so a plain digest is enough:
they can't be guessed, and a slow hash would only slow the requests.

Stored jobs and responses of a key belong to its id, which is derived from its digest: a later key of the same name has another
id. Only a replacement of a key (`keys add NAME --replaces`) keeps that key's id, written into its entry.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from supervisor.catalog.assembly import config_error
from supervisor.catalog.document.document import Items, Layer, Leaf, Node, Problem, Source, Table, Trail, parse
from supervisor.catalog.loading.ownership import read_guarded
from supervisor.catalog.problems import validate
from supervisor.catalog.sections.clients import Limited
from supervisor.catalog.sections.sections import TENANT_LIMIT, Priority
from supervisor.core.admission.limits import NO_LIMITS, TenantLimits
from supervisor.core.demand import MOST_URGENT, priority_of

PREFIX = "sk-llmux-"
VARIABLE = "LLMUX_API_KEYS"
"""The variable with the list itself, for containers without a file."""
_HASHED = "sha256:"
_LEAST_LENGTH = 16
_ID = re.compile(r"key_[0-9a-f]{24}")
_LOCAL = "(local)"


class Scope(StrEnum):
    """What a key allows."""

    INFERENCE = "inference"
    ADMIN = "admin"
    METRICS = "metrics"
    CONFIGURE = "configure"


Shape = Literal["openai", "llm-pool"]
"""The format of requests to `/v1/responses`, and of their answers."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key as it is stored: with its digest, never its secret."""

    name: str
    digest: bytes  # SHA-256
    scopes: frozenset[Scope]
    expires: float | None = None  # Unix seconds
    load_feedback: bool | None = None  # its chat streams report that a model loads; None: as the server's setting
    priority: int | None = None  # of its requests without one; None: the client's, or normal
    priority_ceiling: int = MOST_URGENT  # the most urgent priority of its requests
    tenant: str = ""  # the tenant of its requests; empty: its name is the tenant
    for_others: bool = False  # its requests may name another tenant
    limits: TenantLimits = NO_LIMITS
    responses: Shape | None = None  # of its requests to /v1/responses; None: as the server's setting
    inherited: str = ""  # the id of the key that it replaced

    @property
    def id(self) -> str:
        """The owner of the key's jobs and stored responses."""
        return self.inherited or f"key_{self.digest.hex()[:24]}"


@dataclass(frozen=True, slots=True)
class Keyring:
    """All keys; falsy if there are none. `warnings`: a line for each problem that an operator should fix."""

    keys: tuple[Key, ...] = ()
    warnings: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keys)

    def authenticate(self, secret: bytes | str, now: float) -> Key | None:
        """The key with this secret, unless it has expired by `now` (Unix seconds)."""
        raw = secret.encode("utf-8", "surrogatepass") if isinstance(secret, str) else secret
        digest = hashlib.sha256(raw).digest()
        found = None
        for key in self.keys:
            # Compare all digests, so that the time reveals nothing about a guess.
            if hmac.compare_digest(key.digest, digest):
                found = key
        return None if found is None or (found.expires is not None and found.expires <= now) else found


def moment(text: str) -> float:
    """Unix seconds of a date or time; UTC where it names no zone. A date alone is its first moment. Raises ValueError."""
    found = datetime.fromisoformat(text)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def local_key(secret: str) -> Key:
    """The key that a daemon gives to the commands of its own user."""
    return Key(_LOCAL, hashlib.sha256(secret.encode()).digest(), frozenset(Scope), inherited=_LOCAL)


class _KeyConfig(Limited):
    name: str = Field(min_length=1, max_length=100)
    id: str = Field(default="", pattern=f"^(?:{_ID.pattern})?$")
    key: str | None = None
    key_sha256: str | None = None
    scopes: tuple[Literal["inference", "admin", "metrics", "configure"], ...] = ("inference",)
    expires: str | None = None
    load_feedback: bool | None = None
    priority: Priority | None = None
    priority_ceiling: Priority = MOST_URGENT
    tenant: str = Field(default="", max_length=TENANT_LIMIT)
    for_others: bool = False
    responses: Shape | None = None

    @model_validator(mode="after")
    def _check_entry(self) -> _KeyConfig:
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError('a key is given by either "key" or "key_sha256"')
        if _ID.fullmatch(self.name):
            raise ValueError(f'"name" {self.name} could be the id of a key')
        if not self.scopes:
            raise ValueError("a key without scopes opens nothing")
        self.digest()
        self.expires_at()
        if self.priority is not None and priority_of(self.priority) < priority_of(self.priority_ceiling):
            raise ValueError(
                f'"priority" {self.priority} is more urgent than "priority_ceiling" {self.priority_ceiling}'
            )
        if not self.tenant.isprintable():
            raise ValueError('"tenant" has characters that can\'t be printed')
        return self

    @property
    def is_plain(self) -> bool:
        return self.key is not None and not self.key.startswith(_HASHED)

    def digest(self) -> bytes:
        if self.key is not None and self.is_plain:
            if (problem := weakness(self.key)) is not None:
                raise ValueError(f"the key {problem}")
            return hashlib.sha256(self.key.encode()).digest()
        text = (self.key or self.key_sha256 or "").removeprefix(_HASHED)
        try:
            digest = bytes.fromhex(text)
        except ValueError:
            digest = b""
        if len(digest) != hashlib.sha256().digest_size:
            raise ValueError("a SHA-256 digest has 64 hexadecimal digits")
        return digest

    def expires_at(self) -> float | None:
        if self.expires is None:
            return None
        try:
            return moment(self.expires)
        except ValueError as error:
            raise ValueError(
                f'"expires" must be a date or time such as 2030-01-31 or 2030-01-31T12:00:00Z, got "{self.expires}"'
            ) from error


def weakness(key: str) -> str | None:
    """The reason why a key could be guessed: it is short, or a placeholder. None: it is fine."""
    if len(key) < _LEAST_LENGTH:
        return f"is shorter than {_LEAST_LENGTH} characters and could be guessed"
    if key.startswith("<") and key.endswith(">"):
        return "is a placeholder; put a key of its own there"
    return None


def keyring_of(path: Path | None) -> Keyring:
    """All keys: of this file, or, without a file, of `LLMUX_API_KEYS`. Blocks. Raises ConfigError."""
    if path is not None:
        return load_keys(path)
    place = Source(Layer.ENVIRONMENT, VARIABLE, Path())
    root, problems = parse(os.environ.get(VARIABLE, ""), place)
    keys, _ = _parse_keys(root, problems)
    return Keyring(keys)


def load_keys(path: Path) -> Keyring:
    """The keys of a file: a list, or a list under `keys:`. Blocks on it. Raises ConfigError with every problem."""
    root, problems = read_guarded(path, Source(Layer.FILE, str(path), path.parent))
    keys, plain_names = _parse_keys(root, problems)
    return Keyring(keys, tuple(_exposures(path, plain_names)))


def _parse_keys(root: Node | None, problems: list[Problem]) -> tuple[tuple[Key, ...], list[str]]:
    """The keys, and the names of plain ones (not digests). Raises ConfigError with these and all further problems."""
    keys: dict[str, Key] = {}
    plain_names = []
    for trail, node in _key_nodes(root, problems):
        config, found = validate(_KeyConfig, node, trail, secret=True)
        problems += found
        if config is None:
            continue
        scopes = frozenset(map(Scope, config.scopes))
        key = Key(
            config.name,
            config.digest(),
            scopes,
            config.expires_at(),
            config.load_feedback,
            None if config.priority is None else priority_of(config.priority),
            priority_of(config.priority_ceiling),
            config.tenant,
            config.for_others,
            config.tenant_limits,
            config.responses,
            config.id,
        )
        if key.name in keys:
            problems.append(Problem(node.place, trail, f'a second key named "{key.name}"'))
        for other in keys.values():
            if other.digest == key.digest or other.id == key.id:
                what = "key" if other.digest == key.digest else "id"
                problems.append(Problem(node.place, trail, f'the same {what} as "{other.name}"'))
        keys.setdefault(key.name, key)
        plain_names += [key.name] if config.is_plain else []
    if problems:
        raise config_error(problems)
    return tuple(keys.values()), plain_names


def without_revoked(running: Keyring, path: Path) -> Keyring:
    """The running keys without the rights that the file no longer grants, but no new rights: for a refused file.

    Missing and narrowed keys lose their rights, even the last key: a keyring without a valid key lets nobody in. An entry with
    mistakes revokes nothing. Neither does a lost, damaged or blank file. Blocks on it.
    """
    problems: list[Problem] = []
    root, _ = read_guarded(path, Source(Layer.FILE, str(path), path.parent))
    entries = list(_key_nodes(root, problems))
    if problems or (not entries and not _is_empty_list(root)):
        return running
    granted: dict[bytes, _KeyConfig] = {}
    unreadable: set[object] = set()
    for trail, node in entries:
        config, _ = validate(_KeyConfig, node, trail, secret=True)
        if config is not None:
            granted[config.digest()] = config
        elif isinstance(node, Table) and isinstance(name := node.entries.get("name"), Leaf):
            unreadable.add(name.value)
    keys = []
    for key in running.keys:
        config = granted.get(key.digest)
        if config is not None:
            ends = min((end for end in (key.expires, config.expires_at()) if end is not None), default=None)
            narrowed = replace(
                key,
                scopes=key.scopes & set(map(Scope, config.scopes)),
                expires=ends,
                priority_ceiling=max(key.priority_ceiling, priority_of(config.priority_ceiling)),
                for_others=key.for_others and config.for_others,
            )
            keys.append(narrowed)
        else:
            keys.append(key if key.name in unreadable else replace(key, expires=0.0))
    return replace(running, keys=tuple(keys))


def _is_empty_list(root: Node | None) -> bool:
    return isinstance(root.entries.get("keys") if isinstance(root, Table) else root, Items)


def _key_nodes(root: Node | None, problems: list[Problem]) -> Iterator[tuple[Trail, Node]]:
    trail: Trail = ()
    if isinstance(root, Table) and "keys" in root.entries:
        for name, node in root.entries.items():
            if name != "keys":
                problems.append(Problem(node.place, (name,), 'unknown key; there is only "keys"'))
        root, trail = root.entries["keys"], ("keys",)
    match root:
        case None | Leaf(value=None):
            return
        case Items():
            for index, node in enumerate(root.nodes):
                yield (*trail, index), node
        case _:
            problems.append(Problem(root.place, trail, "expected a list of keys"))


def _exposures(path: Path, plain_names: Iterable[str]) -> Iterator[str]:
    mode = path.stat().st_mode & 0o777
    if mode & 0o044 and (names := ", ".join(plain_names)):
        yield (
            f"{path}: others on this machine can read it (mode {mode:03o}) and it holds plain keys ({names}); "
            f"chmod 600, or keep only their key_sha256"
        )


def new_key(
    name: str,
    scopes: Iterable[Scope] = (Scope.INFERENCE,),
    expires: str | None = None,
    **more: str | int | bool | None,
) -> tuple[str, dict[str, str | int | bool | list[str]]]:
    """A new secret of 256 random bits, to be shown once, and the entry for the file, without the secret.

    `more`: other fields of the entry; None values are skipped.
    """
    secret = PREFIX + secrets.token_urlsafe(32)
    entry: dict[str, str | int | bool | list[str]] = {
        "name": name,
        "key_sha256": hashlib.sha256(secret.encode()).hexdigest(),
        "scopes": [str(scope) for scope in scopes],
    }
    optional = {"expires": expires, **more}
    return secret, entry | {key: value for key, value in optional.items() if value is not None}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this address. True also for `::ffff:127.0.0.1`, which is IPv4's loopback."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def refuse_exposed(host: str, keyring: Keyring, setting: str = "server.host") -> str | None:
    """The reason why the daemon must not listen on `host` (the value of `setting`) without keys. None: it may."""
    if keyring or is_loopback(host):
        return None
    return (
        f"{setting} is {host}, which others can reach, and there are no API keys: anybody could use and stop "
        f"your models. Make a key (`llmux keys add NAME`), or listen on 127.0.0.1"
    )
