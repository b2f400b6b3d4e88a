"""`llmux keys`: the file of API keys. A secret is shown once and stored nowhere.

A change replaces the whole file or nothing: the new file is readable only by its owner, and is read back before it replaces
the old one.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import yaml

from supervisor.catalog.keys import VARIABLE, Key, Keyring, Scope, load_keys, new_key
from supervisor.catalog.problems import nearest
from supervisor.cli import configuration
from supervisor.errors import ConfigError, InvalidRequestError, NotFoundError
from supervisor.host.store import files

_ITEM = re.compile(r"^( *)- ", re.MULTILINE)
_EMPTY = re.compile(r"[ \t]*\[\][ \t]*\n?\Z")

Entry = Mapping[str, str | int | bool | list[str]]


class Listed(TypedDict):
    name: str
    id: str
    scopes: list[str]
    expires: str | None
    load_feedback: bool | None
    priority: int | None
    priority_ceiling: int
    tenant: str
    for_others: bool
    request_rate: str | None
    token_rate: str | None
    concurrency: int | None
    responses: str | None
    state: str


def keys_file(config: Path | None) -> Path:
    """The file from which a daemon with this configuration reads its keys; the file may be missing.

    Raises ConfigError.
    """
    return configuration.settings(config).keys_file()


class AddedKey(NamedTuple):
    secret: str
    scopes: tuple[Scope, ...]
    is_first: bool
    is_administered: bool
    """Whether a valid key of the file opens the admin API."""


def add(
    path: Path,
    name: str,
    scopes: tuple[Scope, ...],
    expires: str | None,
    *,
    replaces: bool = False,
    **more: str | int | bool | None,
) -> AddedKey:
    """Append a new key to the file, which is made if it is missing. `more`: other fields of the key's entry.

    Without `scopes` the key opens inference; the first key also opens administration, else it would lock its maker out.
    With `replaces` the key called `name` is removed; the new key keeps its id, and each field that no argument sets.
    Raises InvalidRequestError when `name` is taken, when there is no key to replace, or when that key has expired and `expires`
    is None; ConfigError for a file with mistakes.
    """
    path = path.resolve()
    if os.environ.get(VARIABLE) and not path.exists():
        raise InvalidRequestError(
            f"{VARIABLE} has the keys here, and a file would count instead: add the key there, or unset it."
        )
    keyring = load_keys(path) if path.exists() else Keyring()
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    old = next((key for key in keyring.keys if key.name == name), None)
    if replaces:
        if old is None:
            raise InvalidRequestError(f"{path} has no key named {name!r} to replace. See: llmux keys list")
        if expires is None and _has_expired(old):
            raise InvalidRequestError(
                f"The key named {name!r} has expired, so say with --expires when the new one does."
            )
        scopes = scopes or tuple(sorted(old.scopes))
    elif old is not None:
        raise InvalidRequestError(
            f"{path} has a key named {name!r} already; choose another name, or replace that key with --replaces."
        )
    scopes = scopes or ((Scope.INFERENCE,) if keyring else (Scope.INFERENCE, Scope.ADMIN))
    secret, entry = new_key(name, scopes, expires, **more)
    if old is not None:
        index = keyring.keys.index(old)
        entry = {**_inherited_fields(_entries(text)[index]), "id": old.id, **entry}
        text = _without_entry(text, index)
    others = [key.name for key in keyring.keys if key is not old]
    if not others:
        text = _EMPTY.sub("", text)
    if not _replace_file(path, _with_entry(text, entry), [*others, name]):
        raise InvalidRequestError(
            f"{path} is laid out in a way that nothing can be appended to; add this by hand. The key: {secret}",
            detail=tuple(_entry_lines(entry, "")),
        )
    opened = (scopes, *(key.scopes for key in keyring.keys if key is not old and not _has_expired(key)))
    return AddedKey(secret, scopes, not keyring, any(Scope.ADMIN in key_scopes for key_scopes in opened))


def _has_expired(key: Key) -> bool:
    return key.expires is not None and key.expires <= time.time()


def _inherited_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a replaced key's entry that its successor keeps: all but the secret, with dates as text."""
    return {name: str(value) if isinstance(value, date) else value for name, value in entry.items() if name != "key"}


def listing(path: Path) -> list[Listed]:
    """Every key of the file, without its secret. Raises ConfigError for a file with mistakes."""
    return [
        {
            "name": key.name,
            "id": key.id,
            "scopes": sorted(key.scopes),
            "expires": None if key.expires is None else datetime.fromtimestamp(key.expires, UTC).isoformat(),
            "load_feedback": key.load_feedback,
            "priority": key.priority,
            "priority_ceiling": key.priority_ceiling,
            "tenant": key.tenant or key.name,
            "for_others": key.for_others,
            "request_rate": None if key.limits.requests is None else str(key.limits.requests),
            "token_rate": None if key.limits.tokens is None else str(key.limits.tokens),
            "concurrency": key.limits.concurrency,
            "responses": key.responses,
            "state": "expired" if _has_expired(key) else "valid",
        }
        for key in (load_keys(path).keys if path.exists() else ())
    ]


def revoke(path: Path, name: str) -> tuple[list[str], bool]:
    """Remove a key from the file; returns the names of the others, and whether the rest of the text is unchanged.

    Raises NotFoundError when there is no such key, ConfigError for a file with mistakes.
    """
    path = path.resolve()
    names = [key.name for key in load_keys(path).keys] if path.exists() else []
    if name not in names:
        near = nearest(name, names)
        raise NotFoundError(
            f"{path} has no key named {name!r}" + (f"; did you mean {near!r}?" if near else ". See: llmux keys list")
        )
    left = [other for other in names if other != name]
    text = path.read_text(encoding="utf-8")
    index = names.index(name)
    without = _without_entry(text, index) + (
        "" if left else "  []\n"
    )  # an empty list: a file without a list would count as damaged
    if _replace_file(path, without, left):
        return left, True
    root = yaml.safe_load(text)
    del (root["keys"] if isinstance(root, dict) else root)[index]
    written = _replace_file(path, yaml.safe_dump(root, sort_keys=False), left)
    assert written
    return left, False


def _replace_file(path: Path, text: str, names: list[str]) -> bool:
    """Replace the file by this text, unless the text has other keys than these names; returns whether it did."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with files.replacing(path, 0o600) as fresh:
            fresh.write_text(text, encoding="utf-8")
            _check_names(fresh, names)
    except ConfigError:
        return False
    return True


def _check_names(path: Path, names: list[str]) -> None:
    """Raises ConfigError unless the file has exactly these keys, in this order."""
    if [key.name for key in load_keys(path).keys] != names:
        raise ConfigError((f"{path}: other keys than were meant",))


def _entries(text: str) -> list[dict[str, Any]]:
    """The entries as parsed YAML, unchecked."""
    root = yaml.safe_load(text)
    found: list[dict[str, Any]] = root["keys"] if isinstance(root, dict) else root
    return found


def _with_entry(text: str, entry: Entry) -> str:
    item = _ITEM.search(text)
    lines = _entry_lines(entry, item[1] if item is not None else "")
    before = text if not text or text.endswith("\n") else f"{text}\n"
    return before + "".join(f"{line}\n" for line in lines)


def _without_entry(text: str, index: int) -> str:
    """The text without the lines of one item; comments above and below it stay."""
    root = yaml.compose(text, yaml.SafeLoader)
    assert root is not None
    if isinstance(root, yaml.MappingNode):
        root = next(value for key, value in root.value if key.value == "keys")
    item = root.value[index]
    lines = text.splitlines(keepends=True)
    del lines[item.start_mark.line : _last_line(item) + 1]
    return "".join(lines)


def _last_line(node: yaml.Node) -> int:
    """The last line of a node's content: YAML's end mark of a block lies after the comments that follow the block."""
    if not isinstance(node, yaml.CollectionNode) or node.flow_style or not node.value:
        line: int = node.end_mark.line
        return line
    last = node.value[-1]
    return _last_line(last[1] if isinstance(last, tuple) else last)


def _entry_lines(entry: Entry, indent: str) -> list[str]:
    # Every JSON value is a YAML value.
    fields = [f"{key}: {json.dumps(value)}" for key, value in entry.items()]
    return [f"{indent}{'- ' if i == 0 else '  '}{line}" for i, line in enumerate(fields)]
