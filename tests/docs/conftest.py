"""What the tests of the documents share."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

GENERATOR = Path(__file__).parents[2] / "docs" / "generate.py"


@pytest.fixture(scope="session")
def generator() -> ModuleType:
    """The program behind `make docs`."""
    spec = importlib.util.spec_from_file_location("docs_generate", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
