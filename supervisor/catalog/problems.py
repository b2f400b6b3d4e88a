"""Rewords pydantic's errors for the author of the file: the place, the expected value, the present one, and a correction.

Every key is checked, and all problems are reported at once. A misspelt key comes with the nearest valid one.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Collection, Iterable
from typing import TypeGuard, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from runtimes.adapters.options import extra_args
from runtimes.model_config import ModelConfig
from supervisor.catalog.document.document import Key, Node, Problem, Table, Trail, find, plain, whole_number
from supervisor.catalog.hints import hint

M = TypeVar("M", bound=BaseModel)

_EXPECTED = {  # by the first word of the type of an error about a wrong type
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "path": "a path",
    "bool": "true or false",
    **dict.fromkeys(("list", "tuple", "set", "frozen"), "a list"),
    **dict.fromkeys(("dict", "model", "dataclass"), "a mapping"),
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]+)", re.IGNORECASE)
_SECONDS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
_MIBS = {"m": 1, "mb": 1, "mib": 1, "g": 1024, "gb": 1024, "gib": 1024}
_YES_NO = {"yes": True, "on": True, "y": True, "no": False, "off": False, "n": False}


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The most similar word, ignoring case; None: none is similar."""
    by_folded = {candidate.casefold(): candidate for candidate in words}
    found = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def suggestion(word: str, words: Iterable[str], *, what: str = "valid") -> str:
    """`; did you mean "x"?`, or all words if there are few, or nothing."""
    known = list(words)
    match = nearest(word, known)
    if match is not None:
        return f'; did you mean "{match}"?'
    return f"; {what}: {', '.join(known)}" if 0 < len(known) <= 12 else ""


def validate(model: type[M], node: Node, trail: Trail, *, secret: bool = False) -> tuple[M | None, list[Problem]]:
    """The validated section, or None and all its problems. `secret`: problems show no values.

    Validates JSON, because pydantic's strict mode then accepts a list for a tuple and text for a path, but no other values of
    a wrong type.
    """
    try:
        return model.model_validate_json(json.dumps(plain(node))), []
    except ValidationError as error:
        return None, _reworded(error.errors(include_url=False), model, node, trail, secret=secret)


def types_at(model: object, trail: Trail) -> tuple[object, ...]:
    """The possible types of a value at `trail` below `model`; none if any type is possible."""
    branches = _branches(model)
    for key in trail:
        branches = tuple(below for branch in branches for below in _annotations_below(branch, key))
    return branches


def _is_model(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _branches(annotation: object) -> tuple[object, ...]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _branches(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(member for branch in typing.get_args(annotation) for member in _branches(branch))
    return (annotation,)


def _annotations_below(annotation: object, key: Key) -> tuple[object, ...]:
    if _is_model(annotation):
        field = annotation.model_fields.get(str(key))
        return _branches(field.annotation) if field else ()
    arguments = typing.get_args(annotation)
    if not arguments or typing.get_origin(annotation) is typing.Literal:
        return ()
    return _branches(arguments[-1] if isinstance(key, str) else arguments[0])


def _reworded(
    errors: list[ErrorDetails], model: type[BaseModel], node: Node, trail: Trail, *, secret: bool
) -> list[Problem]:
    # A value that fits no branch of a union gives an error for each branch: together they are one problem.
    grouped: dict[tuple[Trail, bool], list[ErrorDetails]] = {}
    for error in errors:
        known_by_itself = error["type"] in {"missing", "extra_forbidden"}
        location = error["loc"][:-1] if error["type"] == "missing" else error["loc"]
        walked = find(node, location)[1]
        key = (error["loc"] if known_by_itself else walked, known_by_itself)
        grouped.setdefault(key, []).append(error)
    return [_problem_of(group, model, node, trail, secret=secret) for group in grouped.values()]


def _problem_of(
    group: list[ErrorDetails], model: type[BaseModel], node: Node, trail: Trail, *, secret: bool
) -> Problem:
    first = group[0]
    if first["type"] == "missing":
        parent, walked = find(node, first["loc"][:-1])
        field = first["loc"][-1]
        return Problem(parent.place, (*trail, *walked), f'the key "{field}" is missing')
    at, walked = find(node, first["loc"])
    if first["type"] == "extra_forbidden":
        where, models = find(node, walked[:-1])[0], [*filter(_is_model, types_at(model, walked[:-1]))]
        message = _former_key(str(walked[-1]), where, models) or _unknown_key(str(walked[-1]), where, models)
        return Problem(at.place, (*trail, *walked), message)
    value = plain(at)
    own = [error for error in group if error["type"] in {"value_error", "assertion_error"}]
    if own:
        return Problem(at.place, (*trail, *walked), str(own[0].get("ctx", {}).get("error", own[0]["msg"])))
    expected = " or ".join(dict.fromkeys(_expected_value(error) for error in group))
    got = "" if secret else f", got {_shown_value(value)}"
    if not got:
        return Problem(at.place, (*trail, *walked), f"expected {expected}")
    meant = _amount_hint(trail, walked, value) if "number" in expected else ""
    if walked[-1:] == ("api_keys",) and isinstance(value, list):
        meant = hint("api_keys", ()) or ""
    return Problem(at.place, (*trail, *walked), f"expected {expected}{got}{meant or _value_hint(group, value)}")


def _former_key(word: str, present: Node, models: Iterable[type[BaseModel]]) -> str | None:
    """The message for a former key, or for the option that it became; else None."""
    kinds = [kind for kind in models if issubclass(kind, ModelConfig)]
    former = {key: option for kind in kinds for key, option in kind.former_keys.items()}
    removed = {key: instead for kind in kinds for key, instead in kind.removed_keys.items()}
    if (instead := removed.get(_as_key(word))) is not None:
        return f"llmux has no such key any more; {instead}"
    given = plain(present)
    if _as_key(word) not in former or not isinstance(given, dict):
        return None
    words = extra_args(former, {_as_key(key): value for key, value in given.items()})
    write = f"write extra_args: {json.dumps(words, ensure_ascii=False)}" if words else "remove it"
    return f"llmux has no key for this option; {write}"


def _as_key(word: str) -> str:
    return word.lstrip("-").replace("-", "_")


def _unknown_key(word: str, present: Node, models: Collection[type[BaseModel]]) -> str:
    """The message that a key is unknown, with a suggestion."""
    known = {name for kind in models for name in kind.model_fields}
    absent = known - set(present.entries) if isinstance(present, Table) else known
    options = {
        option: key for kind in models if issubclass(kind, ModelConfig) for option, key in kind.options().items()
    }
    found = hint(word, known, options) or suggestion(word, sorted(absent if nearest(word, absent) else known))
    elsewhere = "; options without a key go into extra_args" if "extra_args" in known else ""
    return f"unknown key{found or elsewhere}"


def _expected_value(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "finite_number":
        return "a finite number"
    if kind.endswith(("_type", "_parsing", "_from_float")) and (word := kind.partition("_")[0]) in _EXPECTED:
        return _EXPECTED[word]
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        bound = context[name]
        return f"{words} {int(bound) if bound == int(bound) else bound}"
    if kind in {"literal_error", "enum"}:
        return str(context["expected"]).replace("'", '"')
    if kind == "string_pattern_mismatch":
        return f"text like {context['pattern']}"
    for name, words in (("min_length", "at least"), ("max_length", "at most")):
        if name in context:
            return f"{words} {context[name]} {'characters' if kind.startswith('string') else 'entries'}"
    message = error["msg"]
    return message[:1].lower() + message[1:]


def _amount_hint(trail: Trail, walked: Trail, value: object) -> str:
    """A suggestion for a number with a unit, such as `15m` for seconds or `8GB` for MiB: the number to write."""
    found = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
    key = " ".join(map(str, (*trail, *walked)))
    units = _SECONDS if re.search(r"_s\b|keep_alive", key) else _MIBS if re.search(r"_mib\b", key) else {}
    unit = units.get(found[2].lower()) if found is not None else None
    if found is None or unit is None:
        return ""
    return f"; write {float(found[1]) * unit:.15g}, in {'seconds' if units is _SECONDS else 'MiB'}"


def _value_hint(group: list[ErrorDetails], value: object) -> str:
    kinds = {error["type"] for error in group}
    if isinstance(value, str):
        if kinds & {"bool_type", "bool_parsing"} and value.lower() in _YES_NO:
            return f"; write {str(_YES_NO[value.lower()]).lower()}"
        if kinds & {"int_type", "float_type"}:
            if (number := whole_number(value)) is not None:
                return f"; write {number}, without quotes"
            if value[-1:] in {"k", "K"} and (number := whole_number(value[:-1])) is not None:
                return f"; write {number * 1024}"
        choices = [word for error in group for word in str(error.get("ctx", {}).get("expected", "")).split("'")[1::2]]
        match = nearest(value, choices)
        return f'; did you mean "{match}"?' if match else ""
    if "string_type" in kinds and isinstance(value, int | float):
        return f'; quote it: "{str(value).lower() if isinstance(value, bool) else value}"'
    return ""


def _shown_value(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:56]}…{text[-1] if text.endswith(chr(34)) else ''}"
