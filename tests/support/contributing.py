"""The runtime that CONTRIBUTING.md adds, taken from that page: what is read there is what runs here.

It has another name here, so that somebody who follows the page to the letter can have theirs beside it.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from runtimes.registry import REGISTRY, Registry

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
NAME = "zulu"


def code() -> tuple[str, str]:
    """The adapter, and its line of the registry."""
    page = PAGE.read_text(encoding="utf-8")
    for theirs, ours in (("acme", NAME), ("Acme", NAME.title()), ("ACME", NAME.upper())):
        page = page.replace(theirs, ours)
    adapter, line = re.findall(r"^ *```python\n(.*?)^ *```$", page, re.DOTALL | re.MULTILINE)
    return adapter, line


@cache
def registry() -> Registry:
    """All runtimes, and that one behind them."""
    adapter, line = code()
    entry: dict[str, str] = ast.literal_eval("{" + line + "}")
    module = sys.modules[f"runtimes.{NAME}.adapter"] = ModuleType(f"runtimes.{NAME}.adapter")
    exec(compile(adapter, str(PAGE), "exec"), module.__dict__)
    return Registry({name: REGISTRY.get(name) for name in REGISTRY.names()} | entry)
