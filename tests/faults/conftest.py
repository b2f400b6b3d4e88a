"""Fixtures of the fault tests. What is measured is printed (`pytest -s`) and recorded as a property of the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clients import Gpu
from tests.support.counts import SOAK


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A soak takes as long as it takes."""
    for item in items:
        if SOAK and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture
def measured(record_property, request) -> Callable[..., None]:
    """`measured(name=value, …)`: numbers that can be quoted."""

    def note(**numbers: object) -> None:
        for name, value in numbers.items():
            record_property(name, value)
        shown = ", ".join(
            f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in numbers.items()
        )
        print(f"\n[{request.node.name}] {shown}")

    return note


@pytest.fixture
def gpu(tmp_path) -> Gpu:
    return Gpu(tmp_path)
