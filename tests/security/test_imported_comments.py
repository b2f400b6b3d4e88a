"""Configurations that are made from strangers' files say what was converted, and nothing that stood in a remark."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from supervisor.catalog.document.yaml_writer import Comments, to_yaml
from supervisor.cli.importers import read

EVIL = "nice\n  evil:\n    cmd: [touch, /tmp/x]\r\nserver: {host: 0.0.0.0}\x85x: 1\u2028y: 1"


@pytest.mark.parametrize("place", ["above", "beside"])
def test_comments_are_one_line(place):
    note = {("models", "a"): EVIL}
    comments = Comments(above={at: [line] for at, line in note.items()}) if place == "above" else Comments(beside=note)
    text = to_yaml({"models": {"a": {"path": "/a.gguf"}}}, comments)
    assert yaml.safe_load(text) == {"models": {"a": {"path": "/a.gguf"}}}


def test_a_title_is_a_comment(tmp_path: Path):
    source = tmp_path / "config.yaml"
    source.write_text(yaml.safe_dump({"models": {"a": {"cmd": "srv --port ${PORT}", "name": EVIL}}}))
    draft = read([source], "llama-swap", tmp_path)
    document = yaml.safe_load(draft.text([f"From {EVIL}"]))
    assert {"models"} == document.keys()
    assert {"a"} == document["models"].keys()
