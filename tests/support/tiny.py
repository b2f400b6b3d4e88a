"""Real models and real llama.cpp programs for tests, made once per machine and kept in the user's cache.

`model(...)` is a scripted GGUF (see supervisor/cli/demo/tiny.py); `projector(...)` gives one eyes; `runtimes_dir()` holds the
embedded llama.cpp, installed when first asked for; `llama_server()` is a real binary, where tests/support/build_llama_server.py
has built one.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from supervisor.cli.demo import tiny
from tests.support import build_llama_server, environments
from tests.support.generators import projector as eyes
from tests.support.made_once import made

CACHE = build_llama_server.CACHE
ANSWER, THOUGHT, TOOL_CALL = tiny.ANSWER, tiny.THOUGHT, tiny.TOOL_CALL


def model(**parameters) -> Path:
    """A model file with these parameters of `Tiny`, e.g. `model(size_mib=100)`."""
    wanted = tiny.Tiny(**parameters)
    return made(f"{wanted.name}.gguf", lambda path: tiny.write(path, wanted), Path(tiny.__file__), wanted)


def projector(text_dim: int = 256) -> Path:
    """A vision encoder of a few KiB that sees the same in every picture, for `mmproj`."""
    return made("projector.gguf", lambda path: eyes.write(path, text_dim), Path(eyes.__file__), text_dim)


@cache
def runtimes_dir() -> Path:
    """A folder with the embedded llama.cpp runtime, installed by the very code that users run."""
    return environments.installed("llama_server")


def llama_server() -> Path | None:
    """A real llama-server program; None where none was built."""
    return build_llama_server.built()
