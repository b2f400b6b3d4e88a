"""The configuration file that `add` and `remove` change."""

from __future__ import annotations

import pytest

from supervisor.cli import adding
from supervisor.errors import ConfigError


class TestTarget:
    """What it may be, and where it lies."""

    def test_no_text(self, folder):
        path = folder.path / "llmux.yaml"
        path.write_bytes(b"models: {}  # caf\xe9\n")
        with pytest.raises(ConfigError, match="not UTF-8"):
            adding.target(path)

    def test_a_link_to_what_is_not_there_yet(self, folder):
        (folder.path / "llmux.yaml").symlink_to("real/mine.yaml")
        place = adding.target(folder.path / "llmux.yaml")
        place.write("models: {}\n")
        assert (folder.path / "real/mine.yaml").read_text() == "models: {}\n"
