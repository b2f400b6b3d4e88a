"""What a client and an operator see is what the files of tests/golden/contract say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import corpus


@pytest.fixture(scope="module")
def stage() -> Iterator[corpus.Stage]:
    with corpus.Stage() as stage:
        yield stage


@pytest.mark.parametrize("path", corpus.scenarios().values(), ids=corpus.scenarios())
def test_it_is_as_recorded(path: Path, stage: corpus.Stage):
    wanted = json.loads(path.read_text())
    found = [f"{kind}: {text}" for kind, text in corpus.differences(wanted, stage.played(wanted))]
    assert not found, "\n".join([*found, "if that is meant: make golden, and commit the files"])
