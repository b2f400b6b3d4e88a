"""What the operating system refuses, as a sentence."""

from __future__ import annotations

import errno
import os

import pytest

from supervisor.cli.failures import of_system


def told(number: int, place: str | None = None) -> str | None:
    found = of_system(OSError(number, os.strerror(number), place))
    return found and found.message


class TestSentences:
    """Each names the place and what to do."""

    @pytest.mark.parametrize(
        ("number", "place", "words"),
        [
            (
                errno.EACCES,
                "/home/me/.config/llmux/llmux.yaml",
                ("Permission denied", f"User {os.getuid()}", "XDG_CONFIG_HOME"),
            ),
            (errno.EROFS, "/home/me/.local/state/llmux/logs", ("read-only", "XDG_STATE_HOME")),
            (errno.EACCES, "/home/me/.local", ("XDG_STATE_HOME", "server.runtimes_dir", "server.models_dir")),
            (errno.EACCES, "/elsewhere/x", ("another place.",)),
            (errno.ENOSPC, "/home/me/x", ("No space left", "Make room")),
            (errno.ENOSPC, None, ("No space left", "Make room")),
            (errno.EMFILE, None, ("ulimit -n",)),
            (errno.ENOTDIR, "/home/me/x/y", ("/home/me/x/y: Not a directory.",)),
        ],
    )
    def test_sentence(self, monkeypatch, number, place, words):
        monkeypatch.setenv("HOME", "/home/me")
        for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"):
            monkeypatch.delenv(variable, raising=False)
        message = told(number, place)
        assert message is not None
        assert (place or "") in message
        for word in words:
            assert word in message

    @pytest.mark.parametrize("number", [errno.EBADF, errno.EPIPE, errno.EINVAL])
    def test_what_nobody_could_mend_keeps_its_traceback(self, number):
        assert told(number) is None
