"""Servers of other projects without their engines: programs that are started and asked as the real ones are.

Each is laid out as its installer would: TGI's launcher is a program, SGLang a package in an environment of its own,
TabbyAPI a checkout with an environment in its folder `venv`. They refuse options that the real program doesn't have
(tests/support/options), find their keys where it does, and fail on a model that it doesn't know, with its words. What they
answer is fake_worker's.
"""

from __future__ import annotations

import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
OPTIONS = HERE / "options"

_COMMON = f"""
import json, os, sys
sys.path.insert(0, {str(HERE)!r})
import fake_worker

known = {{line.strip() for line in open({str(OPTIONS)!r} + "/NAME.txt") if line.startswith("--")}}
words = sys.argv[1:]
for word in words:
    if word.startswith("--") and word.partition("=")[0] not in known:
        sys.exit(f"error: unexpected argument {{word}}")

def said(option):
    return words[words.index(option) + 1]

def check(folder, complaint):
    with open(os.path.join(folder, "config.json")) as file:
        (architecture,) = json.load(file)["architectures"]
    if architecture.startswith("NoSuch"):
        print(complaint.format(architecture), flush=True)
        sys.exit(1)

def serve(key, host, port, name):
    print("argv:", json.dumps(words), flush=True)
    os.environ["FAKE_KEY"] = key
    sys.exit(fake_worker.main(["--host", host, "--port", port, "--name", name, "--key-env", "FAKE_KEY"]))
"""

_TGI = """
check(said("--model-id"), "ValueError: Unsupported model type {}")
import socket
shard = socket.socket(socket.AF_UNIX)
shard.bind(said("--shard-uds-path") + "-0")
serve(os.environ["API_KEY"], said("--hostname"), said("--port"), said("--model-id"))
"""

_SGLANG = """
check(said("--model-path"), "ValueError: Model architectures ['{}'] are not supported for now.")
serve(said("--api-key"), said("--host"), said("--port"), said("--served-model-name"))
"""

_TABBYAPI = """
check(os.path.join(said("--model-dir"), said("--model-name")), "AssertionError: Unknown architecture {}")
assert os.listdir("templates") == ["alpaca.jinja"]  # it looks for them where it runs
assert not os.path.exists("config.yml")
with open("api_tokens.yml") as file:
    serve(json.load(file)["api_key"], said("--host"), said("--port"), said("--model-name"))
"""


def tgi(folder: Path) -> Path:
    """The launcher."""
    program = folder / "text-generation-launcher"
    program.write_text(f"#!{sys.executable} -IS\n{_COMMON.replace('NAME', 'tgi')}{_TGI}")
    program.chmod(0o755)
    return program


def sglang(folder: Path) -> Path:
    """The interpreter of its environment."""
    package = _environment(folder / "environment") / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(
        f'if __name__ == "__main__":\n{_indented(_COMMON.replace("NAME", "sglang") + _SGLANG)}'
    )
    return folder / "environment" / "bin" / "python"


def tabbyapi(folder: Path) -> Path:
    """The checkout; in it a configuration and keys that aren't ours."""
    checkout = folder / "tabbyAPI"
    _environment(checkout / "venv")
    (checkout / "templates").mkdir()
    (checkout / "templates" / "alpaca.jinja").touch()
    (checkout / "api_tokens.yml").write_text('{"api_key": "theirs", "admin_key": "theirs"}')
    (checkout / "config.yml").write_text("model: {model_name: theirs}")
    (checkout / "main.py").write_text(_COMMON.replace("NAME", "tabbyapi") + _TABBYAPI)
    return checkout


def _environment(folder: Path) -> Path:
    """An environment without anything; its packages' folder."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    return packages


def _indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.splitlines())
