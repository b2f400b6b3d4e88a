"""What a worker calls, checked against the sources of the library that it calls, without importing either."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path


def of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool) -> inspect.Signature:
    """A function's signature; `bound`: without `self`."""
    found: list[inspect.Parameter] = []
    places = [*node.args.posonlyargs, *node.args.args]
    optional = len(places) - len(node.args.defaults)
    for at, place in enumerate(places):
        kind = (
            inspect.Parameter.POSITIONAL_ONLY
            if place in node.args.posonlyargs
            else inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        default = None if at >= optional else inspect.Parameter.empty
        found.append(inspect.Parameter(place.arg, kind, default=default))
    if node.args.vararg is not None:
        found.append(inspect.Parameter(node.args.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for place, given in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        default = inspect.Parameter.empty if given is None else None
        found.append(inspect.Parameter(place.arg, inspect.Parameter.KEYWORD_ONLY, default=default))
    if bound:
        found = found[1:]
    return inspect.Signature(found)  # without **kwargs: what only those take, the library ignores


def function(folder: Path, module: str, name: str) -> inspect.Signature:
    """The signature of `name`, or `Class.name`, or of a `Class` as it is called; a dataclass's are its fields."""
    path = folder.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    *owners, last = name.split(".")
    for owner in owners:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner).body
    found = next(node for node in body if getattr(node, "name", None) == last)
    if isinstance(found, ast.ClassDef):
        start = next((node for node in found.body if getattr(node, "name", None) == "__init__"), None)
        if start is None:
            return inspect.Signature(
                inspect.Parameter(
                    node.target.id,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=inspect.Parameter.empty if node.value is None else None,
                )
                for node in found.body
                if isinstance(node, ast.AnnAssign)
            )
        return of_function(start, bound=True)
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in found.decorator_list)
    return of_function(found, bound=bool(owners) and not static)


def calls(folder: Path, name: str) -> Iterator[tuple[int, set[str]]]:
    """Calls of something of this name in a worker's modules: positional arguments, and keywords.

    Keywords that come from a function of the worker are those of the dictionary that it writes.
    """
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _name(node.func) == name:
                keywords = {word.arg for word in node.keywords if word.arg is not None}
                for word in node.keywords:
                    if word.arg is None:
                        keywords |= _keys(tree, word.value)
                yield len(node.args), keywords


def check(worker: Path, name: str, signature: inspect.Signature) -> int:
    """Each such call fits the signature. How many there are; raises TypeError for one that doesn't."""
    count = 0
    for places, keywords in calls(worker, name):
        signature.bind(*[None] * places, **dict.fromkeys(keywords))
        count += 1
    return count


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _keys(tree: ast.Module, value: ast.expr) -> set[str]:
    assert isinstance(value, ast.Call), "keywords from a function of the worker"
    (written,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == _name(value.func)
    )
    return {
        key.value
        for node in ast.walk(written)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
