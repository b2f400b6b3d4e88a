"""What a client and an operator see is what the files of tests/golden/contract say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import corpus


@pytest.mark.parametrize("path", corpus.scenarios().values(), ids=corpus.scenarios())
def test_it_is_as_recorded(path: Path):
    wanted = json.loads(path.read_text())
    found = [f"{kind}: {text}" for kind, text in corpus.differences(wanted, corpus.played(wanted))]
    assert not found, "\n".join([*found, "if that is meant: make golden, and commit the files"])
