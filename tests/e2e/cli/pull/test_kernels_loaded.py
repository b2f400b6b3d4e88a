"""What `llmux pull` lays down is what the package `kernels` and transformers ask for, find without the hub, and load."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from itertools import product

import httpx
import pytest

from runtimes import device_kind
from runtimes.adapters.hub_kernels import VARIABLE, Build, suits
from runtimes.base import LaunchContext
from runtimes.device_kind import DeviceAssignment
from runtimes.transformers.adapter import TransformersAdapter
from runtimes.transformers.shared.quantised import KERNELS
from supervisor.cli.exit_codes import ExitCode
from tests.support import kernels_package, tiny_language
from tests.support.daemon import wait_until
from tests.support.fake_hub import COMMITS, Repo
from tests.support.limits import LIMIT_S

ADAPTER = TransformersAdapter()
PREFIX = "kernels/kernels-community"


def run(python, script: str, *arguments: str, **environment: str) -> str:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KERNELS_"))}
    argv = [str(python), "-I", "-c", script, *arguments]
    done = subprocess.run(argv, env=own | environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def is_ready(client: httpx.Client, worker: subprocess.Popen[bytes]) -> bool:
    assert worker.poll() is None
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


class TestWhatIsAskedFor:
    """The table is that of the pinned transformers; which builds fit is decided as the package decides it."""

    def test_the_table(self):
        script = """
import json, torch, transformers
from transformers.integrations import hub_kernels, mxfp4
asked = {"fp8": hub_kernels._HUB_KERNEL_MAPPING["finegrained-fp8"]}
hub_kernels.get_kernel = lambda repo, **more: asked.update(mxfp4={"repo_id": repo, **more})
mxfp4.replace_with_mxfp4_linear(torch.nn.Sequential(), quantization_config=transformers.Mxfp4Config())
print(json.dumps(asked))
"""
        asked = json.loads(run(tiny_language.python(), script))
        assert asked == {
            method: {"repo_id": kernel.repo, "version": kernel.version} for method, (kernel,) in KERNELS.items()
        }

    def test_which_builds_fit(self):
        frameworks = ["torch213", "torch213-cxx11", "torch213-cxx98", "torch212", "torch-stable-abi29"]
        frameworks += ["torch-stable-abi213", "torch-stable-abi214", "tvm-ffi01"]
        names = ["-".join(parts) for parts in product(frameworks, ["cu126", "cu130", "cu131", "cpu"], ["x86_64-linux"])]
        names += ["torch-cuda", "torch-universal", "torch-cpu", "torch-rocm", "torch213-cu130-aarch64-linux"]
        names += ["torch213-rocm71-x86_64-linux", "torch213-cu130-x86_64-windows"]
        script = """
import json, sys
from packaging.version import Version
from kernels import variants
from kernels.backends import CUDA
def fitting(cuda):
    every = [variants.parse_variant(name) for name in json.loads(sys.argv[1])]
    found, _ = variants._resolve_variant_for_system(
        every, CUDA(Version(cuda)), "x86_64", "linux", Version("2.13"), True, None
    )
    return sorted(variant.variant_str for variant in found)
print(json.dumps([fitting("12.8"), fitting("13.0")]))
"""
        theirs = json.loads(run(kernels_package.python(), script, json.dumps(names)))
        ours = [[n for n in sorted(names) if suits(n, Build((2, 13), cuda, "x86_64"))] for cuda in ((12, 8), (13, 0))]
        assert ours == theirs
        assert all(ours)


class TestWhatIsThere:
    """Offline, from where the model's worker looks."""

    @pytest.fixture
    def pull(self, pull, hub):
        described = {
            "id": "_stand_in_1",
            "name": "stand-in",
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": "cpu"},
        }
        build = {
            "build/torch-universal/metadata.json": json.dumps(described).encode(),
            "build/torch-universal/__init__.py": b"from .answer import answer\n",
            "build/torch-universal/answer.py": b"def answer():\n    return 'from the hub'\n",
        }
        hub.repos[f"{PREFIX}/gpt-oss-triton-kernels"] = Repo({}, versions={"v1": build})
        hub.repos[f"{PREFIX}/finegrained-fp8"] = Repo({}, versions={"v4": build})
        pull.models = {}
        for method, kind in (("fp8", "qwen3"), ("mxfp4", "gpt_oss")):
            folder = tiny_language.model(kind, dtype="bfloat16", quantised=method)
            pull.models[method] = {"runtime": "transformers", "path": str(folder)}
        pull.runtimes_dir.mkdir()
        (pull.runtimes_dir / "transformers").symlink_to(kernels_package.runtimes_dir() / "transformers")
        return pull

    def launch(self, pull, method: str, port: int = 0) -> tuple[list[str], dict[str, str]]:
        """As on a GPU: on the processor the adapter itself refuses quantised weights."""
        config = ADAPTER.config(**pull.models[method], quantization="none", n_ctx=64)
        host = DeviceAssignment("host", device_kind.HOST)
        spec = ADAPTER.launch(config, LaunchContext(method, "127.0.0.1", 0, "key", (host,), pull.runtimes_dir))
        options = {**json.loads(spec.argv[-1]), "quantization": "auto", "port": port}
        return [*spec.argv[:-1], json.dumps(options)], {**os.environ, **spec.env}

    def test_the_package_finds_it(self, pull):
        assert pull().returncode == ExitCode.DONE
        script = """
import sys
from kernels import get_kernel
kernel = get_kernel("kernels-community/finegrained-fp8", version=4)
print(kernel.answer(), kernel.__file__)
"""
        cache = str(pull.runtimes_dir / ".kernels")
        told = run(kernels_package.python(), script, **{VARIABLE: cache, "HF_HUB_OFFLINE": "1"})
        assert told.startswith(f"from the hub {cache}/")
        assert COMMITS["v4"] in told

    @pytest.mark.parametrize("method", ["fp8", "mxfp4"])
    def test_a_worker_without_it_says_how_to_get_it(self, pull, method):
        argv, environment = self.launch(pull, method)
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 1
        assert f"quantization: {method} needs the kernel {KERNELS[method][0].repo}" in done.stderr
        assert f"llmux pull {method}" in done.stderr

    def test_a_worker_with_it_answers(self, pull, tmp_path):
        assert pull("mxfp4").returncode == ExitCode.DONE
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        argv, environment = self.launch(pull, "mxfp4", port)
        path = tmp_path / "log"
        own = {"Authorization": "Bearer key"}
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, headers=own, timeout=LIMIT_S)
        with client, path.open("w") as log, subprocess.Popen(argv, env=environment, stderr=log) as worker:
            try:
                wait_until(lambda: is_ready(client, worker), what=f"the worker is ready; its log: {path}")
                asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
                assert client.post("/v1/chat/completions", json=asked).status_code == 200
            finally:
                worker.kill()
        assert "MXFP4" in path.read_text(), "transformers says that on the processor it computes plain weights"
