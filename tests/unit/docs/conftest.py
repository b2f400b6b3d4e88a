"""What the tests of the documents share."""

from __future__ import annotations

from types import ModuleType

import pytest

from tools import docs


@pytest.fixture(scope="session")
def generator() -> ModuleType:
    """The program behind `make docs`."""
    return docs
