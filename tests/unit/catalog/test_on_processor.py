"""Where a model may run, by what its program can use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from supervisor.catalog import Catalog, load
from supervisor.core.memory.device_sets import device_sets
from supervisor.core.types import DeviceSpec, Footprint, FootprintSource, ModelSpec
from supervisor.daemon.configuration.sizes import warnings_of
from tests.support import tiny


class TestWhereItComputes:
    """Only a model whose program can't use the GPU goes to host memory, and one sentence says so."""

    GPU = DeviceSpec("gpu0", 16384, 512, kind="cuda")
    HOST = DeviceSpec("host", 32000, 960, takes_whole=True, kind="host")
    NOTE = "m: computes on the processor, not on gpu0: its llama_server is built for the processor alone. "

    def catalog(self, folder: Path, runtimes: Path, keys: str) -> Catalog:
        path = folder / "llmux.yaml"
        model = tiny.model(name="tiny-chat")
        path.write_text(f"models: {{m: {{path: {model}{keys}}}}}\nserver: {{runtimes_dir: {runtimes}}}\n")
        return load(path)

    @pytest.fixture
    def made(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", "/nowhere")

        def make(device: str | None, *, program: bool = True) -> Path:
            folder = tmp_path / "runtimes" / "llama_server"
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "bin").mkdir(parents=True)
            for name in ("python", *(["llama-server"] if program else [])):
                (folder / "bin" / name).write_text("#!/bin/sh\n")
                (folder / "bin" / name).chmod(0o755)
            (folder / "llmux.json").write_text(json.dumps({"device": device}))
            return folder.parent

        return make

    @pytest.mark.parametrize(
        ("device", "keys", "where", "told"),
        [
            ("cuda", "", "gpu0", False),
            ("vulkan", "", "gpu0", False),
            ("rocm", "", "host", True),
            ("cpu", "", "host", True),
            ("cuda", ", n_gpu_layers: 0", "host", False),
            ("cuda", ", devices: [host]", "host", False),
            ("cpu", ", devices: [host]", "host", False),
            ("cpu", ", devices: [gpu0]", "gpu0", True),
            ("cpu", ", gpus: auto", "host", True),
            ("cuda", ", binary: /bin/true", "gpu0", False),
            ("cpu", ", binary: /bin/true", "gpu0", False),
        ],
    )
    def test_one_of_llama_server(self, tmp_path, made, device, keys, where, told):
        runtimes = made(device, program=device != "cpu")
        catalog = self.catalog(tmp_path, runtimes, keys).sized((self.GPU, self.HOST))
        (spec,) = catalog.model_specs()
        assert [d.id for way in device_sets(spec, (self.GPU, self.HOST)) for d in way] == [where]
        sentences = [f"{name}: {line}" for name, line in warnings_of(catalog, (spec,), (self.GPU, self.HOST))]
        assert any(line.startswith(self.NOTE) for line in sentences) == told

    def test_without_host_memory_it_stays_where_it_can(self, tmp_path, made):
        (spec,) = self.catalog(tmp_path, made("cpu", program=False), "").model_specs()
        assert device_sets(spec, (self.GPU,)) == [(self.GPU,)]

    def test_nobody_goes_to_host_memory_because_the_gpu_is_full(self):
        spec = ModelSpec("m", "llm", 100, Footprint(99999, FootprintSource.EXPLICIT, ""))
        assert device_sets(spec, (self.GPU, self.HOST)) == [(self.GPU,)]
