"""llama-swap's filters: what it takes out of requests and what it sets in them, for all names of a model or for one.

They become `strip` and `force` of a virtual model for each name; the model's own is one of them.
"""

from __future__ import annotations

from typing import Final

from pydantic import JsonValue

from supervisor.cli.importers.draft import Draft, Values, object_of

_KNOWN: Final = frozenset({"stripParams", "strip_params", "setParams", "set_params", "setParamsByID"})


def apply(draft: Draft, name: str, theirs: str, where: str, filters: JsonValue) -> None:
    """Add the filters of a model, once all its other names are known. `theirs` is its name at llama-swap."""
    filters = object_of(filters)
    strip = filters.get("stripParams") or filters.get("strip_params") or ""
    fields = strip if isinstance(strip, list) else str(strip).split(",")
    stripped = [field for part in fields if (field := str(part).strip()) and field != "model"]
    force = _settable(draft, name, where, filters.get("setParams") or filters.get("set_params"))
    own = {
        name if public == theirs else draft.name(public): _settable(draft, name, where, given)
        for public, given in object_of(filters.get("setParamsByID")).items()
    }
    aliases = [public for public, virtual in draft.virtual_models.items() if virtual["model"] == name]
    for public in dict.fromkeys([name, *aliases, *own]):
        if stripped:
            draft.virtual(public, name)["strip"] = list(stripped)
        if public in own:
            draft.virtual(public, name)
        draft.merge(public, name, "force", force | own.get(public, {}))
    draft.lose_unknown(f"{where}.filters.", filters, _KNOWN, model=name)


def only(filters: JsonValue, theirs: str) -> JsonValue:
    """Of filters that several models share, those of one: what is set for its name is set for all of its names."""
    if not isinstance(filters, dict) or "setParamsByID" not in filters:
        return filters
    shared = {key: value for key, value in filters.items() if key not in {"setParams", "set_params", "setParamsByID"}}
    everybody = object_of(filters.get("setParams") or filters.get("set_params"))
    mine = object_of(object_of(filters["setParamsByID"]).get(theirs))
    return {**shared, "setParams": {**everybody, **mine}}


def _settable(draft: Draft, name: str, where: str, value: JsonValue) -> Values:
    fields = object_of(value)
    for field in [field for field in fields if field in {"model", "stream"}]:
        draft.lose(f"{where}.filters", f'"{field}" decides who answers, and how', model=name)
    return {key: value for key, value in fields.items() if key not in {"model", "stream"}}
