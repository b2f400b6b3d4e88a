"""The home server of config/examples/home-16gb, every model replaced by a tiny one of its runtime, everything else from the
file: names, parameters, priorities, sizes, limits, keys.

Its 16 GiB GPU is a scripted driver (tests/support/fake_nvml.py) on which each worker takes, while it lives, what the file says its
model takes. The workers are real and compute on the processor: the runtimes' Pythons pass that one word on changed.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.support import environments, fake_chatterbox, hearing, tiny, tiny_language
from tests.support.chatterbox import checkpoint, clip
from tests.support.clients import Gpu
from tests.support.daemon import REPOSITORY, Daemon, wait_until

FOLDER = REPOSITORY / "config" / "examples" / "home-16gb"
CONTEXT = 16384


def filled_in(text: str) -> str:
    """The file of keys once somebody has made them, as it says."""
    return re.sub(r"<(\w+)>", lambda found: f"sk-llmux-{found[1]}-{secrets.token_hex(24)}", text)


def stand_in(name: str, model: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Where a tiny model of the same runtime lies."""
    match model["runtime"]:
        case "llama_server":
            return {"path": str(tiny.model(name="tiny-chat")), "mmproj": str(tiny.projector())}
        case "chatterbox":
            path = checkpoint(folder / name, model["variant"])
            (path / "conds.pt").write_bytes(b"its own voice")
            return {"path": str(path)}
        case "transformers" if model.get("type") == "asr":
            return {"path": str(hearing.cohere())}
        case _:
            kind = "gpt_oss" if "gpt-oss" in name else "qwen3_5_vision"
            return {"path": str(tiny_language.model(kind, max_position_embeddings=CONTEXT))}


def on_the_processor(runtimes_dir: Path, runtime: str, python: Path) -> None:
    """An environment that tells nothing of what it was installed for, and whose Python tells workers to compute on the processor,
    whatever device they got.
    """
    program = runtimes_dir / runtime / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        """for word do shift; set -- "$@" "$(printf %s "$word" | sed 's/"device": "cuda"/"device": "cpu"/')"; done\n"""
        f"""exec {shlex.quote(str(python))} "$@"\n"""
    )
    program.chmod(0o755)


class HomeServer(Daemon):
    """The daemon, asked with an operator's key; `sdk` has Open WebUI's."""

    def __init__(self, folder: Path, local: dict[str, Any] | None = None) -> None:
        """`local`: what goes over the file."""
        config = yaml.safe_load((FOLDER / "llmux.yaml").read_text())
        placed = {} if local is None else local["models"]
        self.gpu = Gpu(folder)
        self.sizes: dict[str, int] = {}
        for name, model in config["models"].items():
            self.sizes[name] = model["vram_mib"]
            del model["source"]
            model.pop("quantization", None)  # it takes a real card
            model |= stand_in(name, model, folder / "models") | {"threads": 1}
            if placed.get(name, {}).get("devices") != ["host"]:
                model["env"] = self.gpu.takes(model["vram_mib"])
                if model["runtime"] == "llama_server":  # the embedded one stands for a build for the GPU
                    model["devices"] = ["gpu0"]
        runtimes_dir = folder / "runtimes"
        on_the_processor(runtimes_dir, "transformers", tiny_language.python())
        on_the_processor(runtimes_dir, "chatterbox", fake_chatterbox.environment(folder / "chatterbox"))
        python = environments.installed("llama_server") / "llama_server" / "bin" / "python"
        on_the_processor(runtimes_dir, "llama_server", python)
        config["server"] = {"runtimes_dir": str(runtimes_dir)}
        if local is not None:
            self.sizes |= {name: 0 for name, model in placed.items() if model["devices"] == ["host"]}  # of the GPU
            (folder / "local.yaml").write_text(yaml.safe_dump(local))
        super().__init__(folder, {"devices": "auto", **config}, env=self.gpu.env)
        keys = filled_in((FOLDER / "api_keys.yaml").read_text())
        self.operator = f"sk-llmux-{secrets.token_hex(24)}"
        (folder / "api_keys.yaml").write_text(f"{keys}\n- {{name: operator, key: {self.operator}, scopes: [admin]}}\n")
        (folder / "api_keys.yaml").chmod(0o600)
        clip(folder / "voices" / "anna.wav")
        self._headers = {"Authorization": f"Bearer {self.operator}"}
        self.keys = {entry["name"]: entry["key"] for entry in yaml.safe_load(keys)}
        self.sdk = self.client_of("Open WebUI")

    def client_of(self, name: str) -> openai.OpenAI:
        """The SDK with the key that has this name."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.keys[name],
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )

    def get(self, path: str, **keys: Any) -> Any:
        return super().get(path, headers=self._headers, **keys)

    def post(self, path: str, **keys: Any) -> Any:
        return super().post(path, headers=self._headers, **keys)

    # memory

    def loaded(self) -> set[str]:
        """Names of the models that have a worker."""
        return {model["name"] for model in self.models() if model["state"] != "stopped"}

    def models(self) -> list[dict[str, Any]]:
        return self.get("/v1/admin/models").json()["data"]

    def used_mib(self) -> int | None:
        """What the driver says is taken; None: it was not asked yet, as the daemon just started."""
        device = next(one for one in self.get("/v1/admin/gpu-memory").json()["devices"] if one["id"] == "gpu0")
        return None if device["free_mib"] is None else int(device["total_mib"] - device["free_mib"])

    def given(self, *names: str) -> int:
        """Have these loaded and no others; returns how many decisions were made before."""
        for name in self.loaded() - set(names):
            assert self.post(f"/v1/admin/models/{name}/unload").status_code == 200
        for name in names:
            if name not in self.loaded():
                answer = self.post(f"/v1/admin/models/{name}/load")
                assert answer.status_code == 200, answer.text
        assert self.loaded() == set(names)
        self.settled()
        return len(self.decisions())

    def settled(self) -> int:
        """Wait until the driver shows what is loaded, and nothing is in demand any more; what is taken, in MiB."""
        expected = sum(self.sizes[name] for name in self.loaded())
        wait_until(lambda: self.used_mib() == expected, what=f"{expected} MiB are taken")
        wait_until(lambda: all(map(_idle, self.models())), what="nobody is in demand")
        return expected

    def reason(self, model: str, kind: str) -> str:
        """Why it was decided, last."""
        return next(d["reason"] for d in reversed(self.decisions(model)) if d["kind"] == kind)


def _idle(model: dict[str, Any]) -> bool:
    """Nobody asks for it, and its last request was longer ago than it lingers."""
    return model["in_flight"] == 0 and (model["idle_s"] is None or model["idle_s"] > 0.5)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HomeServer]:
    """Started; nothing is loaded."""
    yield from serving(HomeServer(tmp_path_factory.mktemp("home")))


def serving(server: HomeServer) -> Iterator[HomeServer]:
    """While the test runs."""
    try:
        server.start()
        yield server
    finally:
        server.sdk.close()
        server.stop()
        wait_until(lambda: not server.workers(), what="no worker is left")
