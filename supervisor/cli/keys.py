"""`llmux keys`: new entries for the file of API keys, whose secrets are shown once and kept nowhere."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

from supervisor.catalog import find_config, load
from supervisor.catalog.assembly import KEYS_NAME
from supervisor.catalog.keys import Keyring, Scope, load_keys, new_key
from supervisor.catalog.sections import config_dir
from supervisor.errors import ConfigError, InvalidRequestError

_ITEM = re.compile(r"^( *)- ", re.MULTILINE)

Entry = Mapping[str, str | list[str]]


def keys_file(config: Path | None) -> Path:
    """The file that a daemon with this configuration reads its keys from, whether it is there yet or not.

    Raises ConfigError.
    """
    base = find_config(config)
    if base is None:
        return config_dir() / KEYS_NAME
    return load(base, check_files=False).server.api_keys or base.absolute().with_name(KEYS_NAME)


def add(path: Path, name: str, scopes: Iterable[Scope], expires: str | None) -> str:
    """Append a new key to the file, making it where there is none; returns the secret.

    The file is replaced as a whole, readable for its owner only, and only by one that reads back as the old keys and the
    new one. Raises InvalidRequestError when the name is taken, ConfigError for a file with mistakes.
    """
    path = path.resolve()
    known = load_keys(path) if path.exists() else Keyring()
    names = [key.name for key in known.keys]
    if expires is not None and _is_no_time(expires):
        raise InvalidRequestError(
            f"--expires: {expires!r} is no date or time such as 2030-01-31 or 2030-01-31T12:00:00Z."
        )
    if name in names:
        raise InvalidRequestError(f"{path} has a key named {name!r} already; choose another name.")
    secret, entry = new_key(name, scopes, expires)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(_with_entry(text, entry))
            file.flush()
            os.fsync(file.fileno())
        if _names(fresh) != [*names, name]:
            raise InvalidRequestError(
                f"{path} is laid out in a way that nothing can be appended to; add this by hand. The key: {secret}",
                detail=tuple(_lines(entry, "")),
            )
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return secret


def _is_no_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return True
    return False


def _names(path: Path) -> list[str] | None:
    try:
        return [key.name for key in load_keys(path).keys]
    except ConfigError:
        return None


def _with_entry(text: str, entry: Entry) -> str:
    item = _ITEM.search(text)
    lines = _lines(entry, item[1] if item is not None else "")
    before = text if not text or text.endswith("\n") else f"{text}\n"
    return before + "".join(f"{line}\n" for line in lines)


def _lines(entry: Entry, indent: str) -> list[str]:
    # A JSON value is a YAML value, whatever is in it.
    fields = [f"{key}: {json.dumps(value)}" for key, value in entry.items()]
    return [f"{indent}{'- ' if i == 0 else '  '}{line}" for i, line in enumerate(fields)]
