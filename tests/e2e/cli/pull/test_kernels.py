"""Kernels that quantised weights are computed with come along with the model, in the builds that its worker can load."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path

import pytest

from supervisor.cli.exit_codes import ExitCode
from tests.e2e.cli.pull.conftest import MIB, Pull, content
from tests.support.fake_hub import COMMITS, Hub, Repo

MACHINE = platform.machine()
FP8, MXFP4 = "kernels/kernels-community/finegrained-fp8", "kernels/kernels-community/gpt-oss-triton-kernels"
VARIANTS = (
    *(f"torch213-cxx11-cu130-{MACHINE}-linux", f"torch213-cu128-{MACHINE}-linux", f"torch212-cu130-{MACHINE}-linux"),
    *(f"torch-stable-abi29-cu130-{MACHINE}-linux", "torch213-cu130-sparc-linux", f"torch213-rocm71-{MACHINE}-linux"),
)


def library(variant: str) -> str:
    return f"build/{variant}/_ops.abi3.so"


@pytest.fixture(autouse=True)
def kernels(hub: Hub) -> None:
    """One that is compiled for many builds, and one in Python for all of them."""
    files = {library(variant): content(MIB, seed) for seed, variant in enumerate(VARIANTS)}
    described = {f"build/{variant}/metadata.json": b'{"name": "finegrained-fp8"}' for variant in VARIANTS}
    hub.repos[FP8] = Repo({"README.md": b"# FP8\n"}, frozenset(files), versions={"v4": {**files, **described}})
    hub.repos[MXFP4] = Repo({}, versions={"v1": {"build/torch-cuda/__init__.py": b"# MXFP4\n"}})
    for name in ("fp8", "mxfp4", "bitsandbytes"):
        described_by = json.dumps({"quantization_config": {"quant_method": name}}).encode()
        hub.repos[f"acme/{name}"] = Repo({"config.json": described_by, "model.safetensors": content(1000)})


@pytest.fixture
def pull(pull: Pull) -> Pull:
    pull.models = {"eight": {"runtime": "transformers", "source": {"repo": "acme/fp8"}}}
    return pull


def snapshot(pull: Pull, repo: str, branch: str) -> Path:
    owner, name = repo.split("/")[1:]
    return pull.runtimes_dir / ".kernels" / f"kernels--{owner}--{name}" / "snapshots" / COMMITS[branch]


def ref(pull: Pull, repo: str, branch: str) -> Path:
    return snapshot(pull, repo, branch).parents[1] / "refs" / branch


def variants(pull: Pull) -> set[str]:
    return {path.name for path in (snapshot(pull, FP8, "v4") / "build").iterdir()}


def environment(pull: Pull, *packages: str) -> None:
    """The record of an environment, as far as it tells which builds fit."""
    folder = pull.runtimes_dir / "transformers"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    record = {"python": "3.11.7", "asked_python": None, "device": "cuda", "lock_digest": "0", "packages": packages}
    (folder / "llmux.json").write_text(json.dumps(record))


class TestWhich:
    """The weights decide, by the configuration or by their own config.json."""

    def test_by_the_models_own_config(self, pull):
        pull.models["four"] = {"runtime": "transformers", "source": {"repo": "acme/mxfp4"}}
        assert pull().returncode == ExitCode.DONE
        assert ref(pull, FP8, "v4").read_text() == COMMITS["v4"]
        assert (snapshot(pull, MXFP4, "v1") / "build/torch-cuda/__init__.py").read_bytes() == b"# MXFP4\n"

    def test_by_the_configuration(self, pull):
        pull.models["eight"] = {"runtime": "transformers", "source": {"repo": "acme/tiny"}, "quantization": "fp8"}
        assert [row["repo"] for row in pull.rows()] == ["acme/tiny", "kernels-community/finegrained-fp8"]

    @pytest.mark.parametrize(
        "keys",
        [
            {"quantization": "none"},
            {"device_map": "cpu"},
            {"runtime": "vllm_serve"},
            {"source": {"repo": "acme/bitsandbytes"}},
        ],
    )
    def test_none_is_needed(self, pull, keys):
        pull.models["eight"].update(keys)
        assert [row["kind"] for row in pull.rows("--dry-run")] == ["model"]

    def test_models_share_them(self, pull):
        pull.models["again"] = {**pull.models["eight"], "n_ctx": 64}
        assert [row["models"] for row in pull.rows()] == [["eight", "again"]] * 2

    def test_a_model_whose_files_somebody_put_there(self, pull, tmp_path):
        folder = tmp_path / "mine"
        folder.mkdir()
        (folder / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
        pull.models = {"mine": {"runtime": "transformers", "path": str(folder)}}
        assert [row["kind"] for row in pull.rows("mine")] == ["kernel"]
        assert ref(pull, FP8, "v4").exists()


class TestBuilds:
    """Only what the environment can load is fetched, as far as that can be told."""

    def test_without_an_environment_all_for_this_machine(self, pull):
        assert pull().returncode == ExitCode.DONE
        assert variants(pull) == set(VARIANTS[:4])

    @pytest.mark.parametrize(
        ("packages", "fitting"),
        [
            (("torch==2.13.0", "nvidia-cuda-runtime==13.0.96"), {0, 3}),
            (("torch==2.13.0+cu128",), {1}),
            (("torch==2.12.1", "nvidia_cuda_runtime==13.1.80"), {2, 3}),
            (("torch==2.13.0+cpu",), {0, 1, 2, 3}),
        ],
    )
    def test_of_the_environment(self, pull, packages, fitting):
        environment(pull, *packages)
        assert pull().returncode == ExitCode.DONE
        assert variants(pull) == {VARIANTS[index] for index in fitting}

    def test_there_is_none(self, pull):
        environment(pull, "torch==2.8.0", "nvidia-cuda-runtime==13.0.96")
        done = pull()
        assert done.returncode == ExitCode.FAILED
        assert "no build for torch 2.8, CUDA 13.0" in done.stderr
        assert VARIANTS[0] in done.stderr
        assert pull.names("acme/fp8") == {"config.json", "model.safetensors"}

    def test_a_version_that_the_hub_has_not(self, pull, hub):
        hub.repos[FP8].versions = {"v2": {}}
        assert "no branch v4; there are: main, v2" in pull().stderr


class TestFetching:
    """As with a model's files: whole or not at all, and once."""

    def test_dry_run_tells_and_keeps_nothing(self, pull):
        done = pull("--dry-run")
        assert "finegrained-fp8 (kernel, v4)" in done.stdout
        assert "5 MiB to get" in done.stdout
        assert not pull.runtimes_dir.exists()

    def test_a_second_time_nothing_comes(self, pull, hub):
        pull()
        sent = hub.sent.copy()
        assert pull().returncode == ExitCode.DONE
        assert hub.sent == sent

    def test_workers_see_a_version_once_it_is_whole(self, pull, hub):
        name = library(VARIANTS[0])
        hub.errors[name] = [404]
        assert pull().returncode == ExitCode.FAILED
        assert not ref(pull, FP8, "v4").exists()
        assert pull().returncode == ExitCode.DONE
        assert ref(pull, FP8, "v4").exists()
        assert (snapshot(pull, FP8, "v4") / name).read_bytes() == content(MIB, 0)

    def test_a_broken_line_and_a_wrong_byte(self, pull, hub):
        hub.cuts[library(VARIANTS[0])] = [1000]
        hub.corrupt["build/torch-cuda/__init__.py"] = 1
        pull.models["four"] = {"runtime": "transformers", "source": {"repo": "acme/mxfp4"}}
        done = pull()
        assert done.returncode == ExitCode.DONE
        assert "going on" in done.stderr
        assert "another hash" in done.stderr
        assert (snapshot(pull, FP8, "v4") / library(VARIANTS[0])).read_bytes() == content(MIB, 0)

    def test_a_reference_that_was_lost_is_written_again(self, pull):
        pull()
        shutil.rmtree(ref(pull, FP8, "v4").parent)
        assert pull().returncode == ExitCode.DONE
        assert ref(pull, FP8, "v4").exists()

    def test_where_the_model_says(self, pull, tmp_path):
        pull.models["eight"]["env"] = {"KERNELS_CACHE": str(tmp_path / "else")}
        assert pull().returncode == ExitCode.DONE
        assert (tmp_path / "else/kernels--kernels-community--finegrained-fp8/refs/v4").exists()
