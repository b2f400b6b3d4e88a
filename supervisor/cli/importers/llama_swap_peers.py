"""llama-swap's peers: other servers, each with models that it serves. Each of those becomes an `openai_remote` model.

A peer's model is called `peer/model`, and by its own name where nobody else is. llama-swap sends every request there that
names one, so each gets `allow_remote`. Keys are not copied: where the source names a variable of the environment it is
that one, else one is made up, and said.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Final

from pydantic import JsonValue

from supervisor.cli.importers import llama_swap_filters as filters
from supervisor.cli.importers.draft import Draft, Values, object_of
from supervisor.cli.importers.macros import Definitions, Macros

_VARIABLE: Final = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
_MACRO: Final = re.compile(r"\$\{([A-Za-z0-9_.-]+)\}")
_TIMEOUTS: Final = {"connect": "connect_s", "responseHeader": "first_byte_s"}
_KNOWN: Final = frozenset({"proxy", "apiKey", "models", "filters", "timeouts"})


def add(draft: Draft, peers: JsonValue, macros: Macros, known: Definitions) -> None:
    """Add all peers' models; all others have to be there. What llama-swap would refuse goes to the macros' problems."""
    if not peers:
        return
    if not isinstance(peers, dict):
        macros.problems.append("peers: expected a mapping")
        return
    offered: dict[str, list[str]] = {}
    for peer, values in peers.items():
        models = values.get("models") if isinstance(values, dict) else None
        if not isinstance(values, dict) or not values.get("proxy") or not isinstance(models, list) or not models:
            macros.problems.append(f"peers.{peer}: expected a mapping with proxy and models")
        else:
            offered[peer] = [str(macros.fill(model, known, f"peers.{peer}.models")) for model in models]
    often = Counter(model for listed in offered.values() for model in set(listed))
    for peer, listed in offered.items():
        values = peers[peer]
        assert isinstance(values, dict)
        _peer(draft, peer, values, {model: often[model] == 1 for model in listed}, macros, known)


def _peer(
    draft: Draft,
    peer: str,
    values: Mapping[str, JsonValue],
    models: Mapping[str, bool],
    macros: Macros,
    known: Definitions,
) -> None:
    """`models`: is it the only peer that has it?"""
    where = f"peers.{peer}"
    address = str(macros.fill(values["proxy"], known, f"{where}.proxy"))
    if not address.startswith(("http://", "https://")):
        draft.lose(where, f"llmux reaches others by http: or https:, not by {address.partition(':')[0]}:")
        return
    remote: Values = {"runtime": "openai_remote", "base_url": f"{address.rstrip('/')}/v1"}
    if key := values.get("apiKey"):
        variable = _variable(str(key), known)
        if variable is None:
            variable = f"{re.sub(r'[^A-Z0-9]+', '_', peer.upper()).strip('_') or 'PEER'}_API_KEY"
            variable = f"PEER_{variable}" if variable[0].isdigit() else variable
            draft.look(f"{where}.apiKey", f"is not copied: put it into the daemon's environment, as {variable}")
        remote["api_key_env"] = variable
    timeouts = object_of(values.get("timeouts"))
    draft.lose_unknown(f"{where}.timeouts.", timeouts, _TIMEOUTS)
    for name, key in _TIMEOUTS.items():
        if isinstance(limit := timeouts.get(name), int | float) and limit > 0:
            remote[key] = limit
    remote["allow_remote"] = True
    draft.look(where, "its models are sent every request that names them, as before: allow_remote")
    draft.lose_unknown(f"{where}.", values, _KNOWN)
    for model, is_only in models.items():
        name = draft.name(f"{peer}/{model}")
        if name in draft.models or name in draft.virtual_models:
            macros.problems.append(f"{where}.models: {name} is there already")
            continue
        short = draft.name(model)
        if is_only and short not in draft.models and short not in draft.virtual_models:
            draft.virtual(short, name)
        draft.models[name] = {**remote, "upstream_model": model}
        rules = filters.only(macros.fill(values.get("filters"), known, f"{where}.filters"), model)
        filters.apply(draft, name, model, where, rules)


def _variable(key: str, known: Definitions) -> str | None:
    """The variable that a key comes from, itself or by macros; None: it stands there."""
    for _ in range(len(known) + 1):
        if (found := _VARIABLE.fullmatch(key)) is not None:
            return found[1]
        if (macro := _MACRO.fullmatch(key)) is None or not isinstance(value := known.get(macro[1]), str):
            return None
        key = value
    return None
