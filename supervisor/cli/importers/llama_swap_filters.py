"""llama-swap's filters: what it takes out of requests and what it sets in them, for all names of a model or for one.

They become `strip` and `force` of a virtual model for each name; the model's own is one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import JsonValue

from supervisor.cli.importers.draft import Draft, Values

_KNOWN: Final = frozenset({"stripParams", "strip_params", "setParams", "set_params", "setParamsByID"})


def apply(draft: Draft, name: str, theirs: str, where: str, filters: JsonValue) -> None:
    """Add the filters of a model, once all its other names are known. `theirs` is its name at llama-swap."""
    if not isinstance(filters, dict):
        return
    strip = filters.get("stripParams") or filters.get("strip_params") or ""
    fields = strip if isinstance(strip, list) else str(strip).split(",")
    if stripped := [field for part in fields if (field := str(part).strip()) and field != "model"]:
        for public in _public_names(draft, name):
            draft.virtual(public, name)["strip"] = list(stripped)
    force = filters.get("setParams") or filters.get("set_params")
    if isinstance(force, dict):
        for public in _public_names(draft, name):
            draft.merge(public, name, "force", _settable(draft, name, where, force))
    by_id = filters.get("setParamsByID")
    for public, given in by_id.items() if isinstance(by_id, dict) else ():
        if isinstance(given, dict):
            ours = name if public == theirs else draft.name(public)
            target = draft.virtual(ours, name)
            if stripped:
                target["strip"] = list(stripped)
            if isinstance(force, dict):
                draft.merge(ours, name, "force", _settable(draft, name, where, force))
            draft.merge(ours, name, "force", _settable(draft, name, where, given))
    draft.lose_unknown(f"{where}.filters.", filters, _KNOWN, model=name)


def only(filters: JsonValue, theirs: str) -> JsonValue:
    """Of filters that several models share, those of one: what is set for its name is set for all of its names."""
    if not isinstance(filters, dict) or "setParamsByID" not in filters:
        return filters
    shared = {key: value for key, value in filters.items() if key not in {"setParams", "set_params", "setParamsByID"}}
    given = (filters.get("setParams") or filters.get("set_params"), filters["setParamsByID"])
    everybody, by_id = (part if isinstance(part, dict) else {} for part in given)
    mine = by_id.get(theirs)
    return {**shared, "setParams": {**everybody, **(mine if isinstance(mine, dict) else {})}}


def _public_names(draft: Draft, name: str) -> list[str]:
    aliases = [public for public, virtual in draft.virtual_models.items() if virtual["model"] == name]
    return list(dict.fromkeys([name, *aliases]))


def _settable(draft: Draft, name: str, where: str, fields: Mapping[str, JsonValue]) -> Values:
    for field in [field for field in fields if field in {"model", "stream"}]:
        draft.lose(f"{where}.filters", f'"{field}" decides who answers, and how', model=name)
    return {key: value for key, value in fields.items() if key not in {"model", "stream"}}
