"""The runtime that CONTRIBUTING.md adds, taken from that page: what is read there is what runs here."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from runtimes.registry import REGISTRY, Registry

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
MODULE = "runtimes.acme.adapter"


def code() -> tuple[str, str]:
    """The adapter, and its line of the registry."""
    adapter, line = re.findall(
        r"^ *```python\n(.*?)^ *```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return adapter, line


@cache
def registry() -> Registry:
    """All runtimes and that one."""
    adapter, line = code()
    module = sys.modules[MODULE] = ModuleType(MODULE)
    exec(compile(adapter, str(PAGE), "exec"), module.__dict__)
    return Registry({name: REGISTRY.get(name) for name in REGISTRY.names()} | ast.literal_eval("{" + line + "}"))
