"""What is shown of an installation while it lasts."""

from __future__ import annotations

from contextlib import contextmanager

from supervisor.cli import output
from supervisor.cli.environments import environments
from supervisor.host.environments.recipe import Recipe
from tests.support.wheels import wheel


class TestBar:
    """Of the packages that this installation brings, those that are there."""

    def test_it_gets_full(self, tmp_path, monkeypatch):
        """Locks also hold what is for other Pythons."""
        digest = wheel(tmp_path / "wheels", "worker", "1.0")
        lock = tmp_path / "requirements.lock"
        lock.write_text(
            f"worker==1.0 \\\n    --hash=sha256:{digest}\n"
            f"older==1.0 ; python_full_version < '3' \\\n    --hash=sha256:{digest}\n"
        )
        rows: list[output.Row] = []

        @contextmanager
        def progress(frame):
            rows.append(frame())
            yield
            rows.append(frame())

        monkeypatch.setenv("UV_NO_INDEX", "1")
        monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
        monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
        monkeypatch.setattr(environments, "recipe_of", lambda name: Recipe(name, lock))
        monkeypatch.setattr(output, "progress", progress)
        environments.install("demo", tmp_path / "runtimes", lambda _line: None)
        first, last = rows
        assert first[1:3] == (output.Bar(0.0), "0 of 2 packages")
        assert last[1:3] == (output.Bar(1.0), "1 of 1 packages")
