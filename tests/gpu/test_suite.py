"""The suite for real GPUs, on a scripted driver: workers pretend to take its memory, and it measures what they take."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu import __main__ as bench
from bench.gpu import card as cards
from bench.gpu import measures, page, subjects
from runtimes.registry import REGISTRY
from supervisor.host.environments import venvs
from tests.support import daemon as daemons
from tests.support import hf_folder, minilm
from tests.support.clients import Gpu
from tests.support.daemon import REPOSITORY, fake, running, wait_until

TAKES = 3000
STAND_IN = [sys.executable, "-c", "import sys; print('taken', flush=True); sys.stdin.read()"]
SUBJECT = replace(subjects.SUBJECTS["transformers"], runtime="command")
LIBCUDA = """
#include <stddef.h>
#include <stdlib.h>
static size_t mib(const char *name) { return (size_t)atol(getenv(name)) << 20; }
int cuInit(unsigned flags) { return 0; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) { return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = mib("FREE_MIB"); *total = mib("FREE_MIB"); return 0; }
int cuMemAlloc_v2(unsigned long long *pointer, size_t size) { return size > mib("LEFT_MIB") ? 2 : 0; }
"""
"""A driver of CUDA that says how much is free, of which others have taken some when it comes to allocating."""


@pytest.fixture
def scripted(tmp_path, monkeypatch) -> Gpu:
    gpu = Gpu(tmp_path)
    for name, value in gpu.env.items():
        monkeypatch.setenv(name, value)
    return gpu


@pytest.fixture
def card(scripted) -> cards.Card:
    return cards.first()


@pytest.fixture
def daemon(tmp_path, scripted):
    model = fake(vram_mib=TAKES, env=scripted.takes(TAKES))
    config = {"devices": "auto", "models": {"a": model, "b": model}, "limits": subjects.LIMITS}
    with running(tmp_path, config, env=scripted.env) as daemon:
        yield daemon


class TestMeasures:
    """Each function finds what the script says."""

    def test_a_life(self, daemon, card):
        before_mib = card.free_mib()
        assert measures.load(daemon, "a") > 0
        measures.answered(daemon, SUBJECT, "a")
        assert measures.footprint(daemon, card, "a", before_mib).taken_mib == TAKES
        assert measures.speed(daemon, SUBJECT, "a").first_s > 0
        assert measures.contexts(daemon, card) == []
        measures.kill(daemon, card, "a", before_mib)
        assert card.free_mib() == before_mib

    def test_memory_that_comes_back_late(self, scripted, card):
        """The driver's figure is taken when it doesn't change any more."""
        scripted.write(first={"processes": [{"pid": 1, "mib": 100}]})
        taken_mib = card.free_mib()
        with ThreadPoolExecutor(1) as threads:
            found = threads.submit(measures.settled, card)
            scripted.write()
            assert found.result() == taken_mib + 100

    def test_a_stream_that_breaks(self, tmp_path, scripted):
        """What the daemon writes at its end is told."""
        config = {"devices": "auto", "models": {"a": fake("--die-after", "2", vram_mib=TAKES)}}
        with running(tmp_path, config, env=scripted.env) as daemon, pytest.raises(AssertionError, match="'error': "):
            measures.speed(daemon, SUBJECT, "a")

    def test_swaps(self, daemon, card):
        found = measures.swaps(daemon, card, SUBJECT, ["a", "b"], 4)
        assert (found.count, found.leak_mib) == (4, 0)

    def test_a_leak_is_found(self, daemon, card, scripted):
        measures.answered(daemon, SUBJECT, "a")
        measures.answered(daemon, SUBJECT, "b")
        before_mib = card.free_mib()
        scripted.write(first={"processes": [{"pid": 1, "mib": 100}]})
        assert before_mib - card.free_mib() == 100
        with pytest.raises(AssertionError, match="MiB are free again"):
            measures.back(card, before_mib, limit_s=0.1)

    def test_a_context_of_the_supervisors_is_found(self, daemon, card, scripted):
        scripted.write(first={"processes": [{"pid": daemon.process.pid, "mib": 300}]})
        (found,) = measures.contexts(daemon, card)
        assert found.startswith(str(daemon.process.pid))

    def test_an_outsider(self, daemon, card, scripted):
        before_mib = card.free_mib()
        with measures.Outsider(0, argv=STAND_IN, env=scripted.takes(9000)):
            wait_until(lambda: card.free_mib() == before_mib - 9000)
            assert daemon.get("/health").status_code == 200
        measures.back(card, before_mib)
        measures.answered(daemon, SUBJECT, "b")

    def test_an_outsider_during_a_load(self, tmp_path, scripted):
        """It comes while the worker starts; what the daemon says of a load that fails is handed on."""
        slow = fake("--start-delay", "2", vram_mib=TAKES, env=scripted.takes(TAKES))
        models = {"a": slow, "b": fake("--exit-code", "3")}
        config = {"devices": "auto", "models": models, "limits": subjects.LIMITS}
        with running(tmp_path, config, env=scripted.env) as daemon:
            outsider = measures.Outsider(0, argv=STAND_IN, env=scripted.takes(9000))
            assert measures.load_beside(daemon, "a", outsider) == measures.Beside(during=True, failure=None)
            assert "b was not loaded: " in measures.load_beside(daemon, "b", outsider).failure

    @pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for a stand-in of libcuda")
    @pytest.mark.parametrize(
        ("asked", "left", "taken"),
        [(1024, 16000, 1024), (20000, 16000, 16000 - 256), (20000, 9000, 8960)],
        ids=["as asked", "no more than is free", "no more than others leave"],
    )
    def test_what_an_outsider_takes(self, tmp_path, monkeypatch, asked, left, taken):
        """Its own context and the worker that is loading take memory, too."""
        source = tmp_path / "cuda.c"
        source.write_text(LIBCUDA)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        done = subprocess.run(
            [sys.executable, "-c", measures.TAKE, str(asked)],
            env={**os.environ, "FREE_MIB": "16000", "LEFT_MIB": str(left)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"taken {taken}\n"


class TestBench:
    """All subjects, one after the other."""

    @pytest.fixture
    def tell(self, scripted, monkeypatch, tmp_path):
        """Measures stand-ins: one that works, one whose worker crashes, one that takes no memory of the GPU."""
        env = scripted.takes(TAKES)
        stand_ins = {
            "crashes": fake("--exit-code", "3", vram_mib=TAKES),
            "on the processor": fake(vram_mib=TAKES),
            "works": fake(vram_mib=TAKES, env=env),
        }
        subject = {name: replace(SUBJECT, model=None, keys=model) for name, model in stand_ins.items()}
        monkeypatch.setattr(subjects, "SUBJECTS", subject)
        start = daemons.running
        monkeypatch.setattr(daemons, "running", lambda *words, **keys: start(*words, env=scripted.env, **keys))
        lines: list[str] = []

        def measured() -> tuple[list[str], tuple[page.Figures, ...], list[str]]:
            file = tmp_path / "figures.json"
            failed = bench.measure(cards.first(), subject, tmp_path, swaps=2, file=file, echo=lines.append)
            return failed, page.read(file), lines

        return measured

    def test_one_that_fails_leaves_the_others_running(self, tell):
        failed, figures, lines = tell()
        assert failed == ["crashes", "on the processor"], lines
        assert [(one.subject, one.taken_mib, one.swaps, one.leak_mib) for one in figures] == [("works", TAKES, 2, 0)]
        assert "crashes: failed: AssertionError: " in lines[0]
        assert any("for the processor alone" in line for line in lines)

    def test_nothing_is_installed(self, tmp_path, scripted, monkeypatch):
        """Not even llama.cpp's server, which most tests' daemons serve."""
        monkeypatch.setattr(subjects.environments, "installed", lambda name: pytest.fail(f"it installs {name}"))
        with running(tmp_path, {"server": {"runtimes_dir": str(tmp_path)}, "models": {"a": fake()}}) as daemon:
            assert daemon.get("/health").status_code == 200
        for name in ("faster_whisper", "whisper_cpp"):
            assert subjects.SUBJECTS[name].request()["files"]


class TestSubjects:
    """Every runtime has one, or says why not; what is missing for one is named."""

    def test_every_runtime(self):
        tried = {subject.runtime for subject in subjects.SUBJECTS.values()}
        assert set(REGISTRY.names()) <= tried | subjects.ELSEWHERE.keys()
        assert tried <= set(REGISTRY.names())
        assert not tried & subjects.ELSEWHERE.keys()

    def test_they_are_named_by_their_runtimes(self):
        assert all(name.partition("-")[0] == subject.runtime for name, subject in subjects.SUBJECTS.items())

    def test_quantised_ones(self):
        assert {"transformers-fp8", "transformers-mxfp4", "transformers-bnb4"} <= subjects.SUBJECTS.keys()

    @pytest.mark.parametrize("name", ["transformers", "vllm", "llama_cpp", "chatterbox", "faster_whisper", "diffusers"])
    def test_an_environment_is_missing(self, tmp_path, name):
        with subjects.written_by(tmp_path):
            assert "llmux runtimes install" in subjects.missing(name, "gpu0", tmp_path)

    def test_an_environment_for_another_device(self, tmp_path, monkeypatch):
        python = tmp_path / "vllm" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
        found = venvs.Environment("vllm", tmp_path / "vllm", "3.11.7", None, "cpu", "", ())
        monkeypatch.setattr(venvs, "installed", lambda *_: found)
        assert subjects.missing("vllm", "gpu0", tmp_path) == (
            "the environment of vllm is for cpu: llmux runtimes install vllm --accelerator cuda"
        )
        monkeypatch.setattr(venvs, "installed", lambda *_: replace(found, device="cuda"))
        assert subjects.missing("vllm", "gpu0", tmp_path) is None

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("exllamav3", "LLMUX_TEST_EXL3 names no EXL3 model's folder"),
            ("tabbyapi", "LLMUX_TEST_TABBYAPI names no checkout of TabbyAPI"),
            ("comfyui", "LLMUX_TEST_COMFYUI names no checkout of ComfyUI"),
        ],
    )
    def test_what_only_the_user_has(self, tmp_path, monkeypatch, name, told):
        for variable in ("LLMUX_TEST_EXL3", "LLMUX_TEST_TABBYAPI", "LLMUX_TEST_COMFYUI"):
            monkeypatch.delenv(variable, raising=False)
        assert subjects.missing(name, "gpu0", tmp_path) == told

    def test_a_server_of_another_project(self, tmp_path, monkeypatch):
        """What a variable names is looked at."""
        monkeypatch.setenv("LLMUX_TEST_EXL3", str(tmp_path))
        monkeypatch.setenv("LLMUX_TEST_TABBYAPI", str(tmp_path))
        assert str(tmp_path / "config.json") in subjects.missing("tabbyapi", "gpu0", tmp_path)
        monkeypatch.setenv("LLMUX_TEST_WHISPER_SERVER", str(tmp_path / "whisper-server"))
        assert subjects.SUBJECTS["whisper_cpp"].config("gpu0")["binary"] == str(tmp_path / "whisper-server")

    def test_a_workflow_that_needs_no_checkpoint(self, tmp_path, monkeypatch):
        """ComfyUI's stand-in takes it."""
        monkeypatch.setenv("LLMUX_TEST_COMFYUI", str(tmp_path))
        adapter = REGISTRY.get("comfyui")
        config = adapter.config(**subjects.SUBJECTS["comfyui"].config("gpu0"))
        problems = adapter.check(config, runtimes_dir=tmp_path)
        assert [problem.partition(":")[0] for problem in problems] == ["folder", "python"]

    @pytest.mark.parametrize("name", subjects.SUBJECTS)
    def test_its_keys_are_valid(self, name, tmp_path, monkeypatch, scripted):
        """All that its adapter finds wrong is that files and programs aren't here."""
        for variable in ("LLMUX_TEST_EXL3", "LLMUX_TEST_TABBYAPI", "LLMUX_TEST_COMFYUI"):
            monkeypatch.setenv(variable, str(tmp_path))
        subject = subjects.SUBJECTS[name]
        folder = hf_folder.write(
            tmp_path / "model", {"architectures": ["CLIPModel"]} if name == "embeddings-clip" else {}
        )
        made = replace(subject, model=None if subject.model is None else lambda: folder)
        adapter = REGISTRY.get(subject.runtime)
        config = adapter.config(**made.config("gpu0"))
        assert config.devices == ["gpu0"]
        problems = adapter.check(config, runtimes_dir=tmp_path)
        assert {problem.partition(":")[0] for problem in problems} <= {"path", "folder", "python", "binary"}

    def test_a_kernel_of_the_hub(self, tmp_path, monkeypatch):
        """FP8 needs one, which `llmux pull` gets."""
        folder = hf_folder.write(tmp_path / "model", {"quantization_config": {"quant_method": "fp8"}})
        (folder / "tokenizer.json").write_text("{}")
        python = tmp_path / "transformers" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
        found = venvs.Environment("transformers", tmp_path / "transformers", "3.11.7", None, "cuda", "", ())
        monkeypatch.setattr(venvs, "installed", lambda *_: found)
        subject = replace(subjects.SUBJECTS["transformers-fp8"], model=lambda: folder)
        monkeypatch.setattr(subjects, "SUBJECTS", {"fp8": subject})
        told = subjects.missing("fp8", "gpu0", tmp_path)
        assert told.startswith(f"the kernel kernels-community/finegrained-fp8 is not in {tmp_path / '.kernels'}: ")
        repository = tmp_path / ".kernels" / "kernels--kernels-community--finegrained-fp8"
        (repository / "refs").mkdir(parents=True)
        for kernel in REGISTRY.get("transformers").kernels(
            REGISTRY.get("transformers").config(**subject.config("gpu0")),
            lambda: json.loads((folder / "config.json").read_text()),
        ):
            (repository / "refs" / kernel.branch).touch()
        assert subjects.missing("fp8", "gpu0", tmp_path) is None

    def test_a_model_that_no_index_gives(self, tmp_path, monkeypatch):
        def folder() -> Path:
            raise subprocess.CalledProcessError(1, "uv")

        monkeypatch.setattr(minilm, "folder", folder)
        assert minilm.PACKAGE in subjects.missing("embeddings", "gpu0", tmp_path)


class TestPage:
    """Figures are kept by card and subject, and shown as a table."""

    ONE = page.Figures("Card", "vllm", "2026-11-24", 10.0, 0.1, 99.5, 1000, 1100, 1.5, 12.0, 100, 0)

    def test_none_yet(self):
        assert page.tables(()) == page.NONE

    def test_a_table(self):
        first, _, head, _, row = page.tables([self.ONE]).splitlines()
        assert (first, head.count("|")) == ("**Card**", len(page.HEAD) + 1)
        assert row == "| `vllm` | 2026-11-24 | 10.0 | 0.10 | 100 | 1000 | 1100 | 1.5 | 12.0 | 0 (100) |"

    def test_a_new_run_replaces_an_old_one(self, tmp_path):
        new, other = replace(self.ONE, date="2026-12-01"), replace(self.ONE, card="Another")
        found = page.merged([self.ONE, other], [new])
        assert found == (other, new)
        page.write(found, tmp_path / "figures.json")
        assert page.read(tmp_path / "figures.json") == found
        assert page.read(tmp_path / "none.json") == ()

    def test_without_a_gpu_it_says_so(self):
        env = {**os.environ, "LLMUX_NVML_MODULE": str(REPOSITORY / "tests/support/fake_nvml.py")}
        done = subprocess.run(
            [sys.executable, "-m", "bench.gpu"], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False
        )
        assert (done.returncode, json.dumps(done.stdout)[:19]) == (1, '"no NVIDIA GPU: NVM')
