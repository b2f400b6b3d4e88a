"""The packages that a runtime's workers import, read from their source.

A worker program is a module in the runtime's folder with a main guard. The environment must have all packages that this
module, and the modules of `runtimes` that it imports, import at the top or in a function; an import inside `try` is optional.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import runtimes

RUNTIMES: Final = Path(runtimes.__file__).parent
MAIN_GUARD: Final = 'if __name__ == "__main__":'


def imports(folder: Path) -> set[str]:
    """The imported modules that are neither in the standard library nor in `runtimes`."""
    ahead = [path for path in folder.rglob("*.py") if MAIN_GUARD in path.read_text(encoding="utf-8")]
    seen: set[Path] = set()
    found: set[str] = set()
    while ahead:
        path = ahead.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in _imported_names(ast.parse(path.read_text(encoding="utf-8"))):
            top, *inner = name.split(".")
            if top == "runtimes":
                module = RUNTIMES.joinpath(*inner)
                ahead += filter(Path.exists, (module.with_suffix(".py"), module / "__init__.py"))
            elif top not in sys.stdlib_module_names:
                found.add(name)
    return found


def _imported_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        if node.module.partition(".")[0] == "runtimes":  # `from runtimes.sdk import server` also names a module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif not isinstance(node, ast.Try) and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
        for child in ast.iter_child_nodes(node):
            yield from _imported_names(child)
