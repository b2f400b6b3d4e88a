"""Runtimes on other projects' servers: their options, refused options, and memory estimates."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from runtimes import device_kind
from runtimes.base import LaunchContext, ModelUnusableError, RuntimeNotInstalledError
from runtimes.device_kind import DeviceAssignment
from runtimes.registry import REGISTRY
from tests.support import fake_servers, hf_folder

NAMES = ("sglang", "tgi", "tabbyapi")


class Server:
    """One of them, as it is configured."""

    def __init__(self, name, folder):
        self.adapter, self.folder = REGISTRY.get(name), folder
        (folder / "venv" / "bin").mkdir(parents=True)
        (folder / "venv" / "bin" / "python").symlink_to("/bin/true")
        (folder / "main.py").touch()
        program = {
            "sglang": {"python": "/bin/true"},
            "tgi": {"binary": "/bin/true", "vram_mib": 20_000},
            "tabbyapi": {"folder": str(folder)},
        }[name]
        self.keys = {"path": str(hf_folder.write(folder / "model", hf_folder.QWEN3_8B)), **program}

    def config(self, **keys):
        return self.adapter.config(runtime=self.adapter.name, **{**self.keys, **keys})

    def problems(self, **keys):
        return self.adapter.check(self.config(**keys), runtimes_dir=self.folder)

    def words(self, devices=1, parts=(), **keys):
        """Its command line on so many GPUs."""
        return self.adapter.launch(self.config(**keys), place(self.folder, devices, parts)).argv


def place(folder, gpus=1, parts=()) -> LaunchContext:
    devices = tuple(DeviceAssignment(f"gpu{index}", device_kind.CUDA, index) for index in range(gpus))
    return LaunchContext("the-model", "127.0.0.1", 8100, "the-key", devices, folder / "runtimes", parts)


def value(words, option):
    return words[words.index(option) + 1]


@pytest.fixture
def server(request, tmp_path):
    return Server(request.param, tmp_path)


def of(*names):
    return pytest.mark.parametrize("server", names, indirect=True)


class TestOptions:
    """Only options that the real program has; options that llmux sets are refused."""

    @of(*NAMES)
    def test_the_program_has_all_of_them(self, server):
        theirs = (fake_servers.OPTIONS / f"{server.adapter.name}.txt").read_text().splitlines()
        told = {*server.words(), *server.words(2, gpus=2), *server.words(2, (5120, 10_240), gpus="auto")}
        assert {word for word in told | server.adapter.config.options().keys() if word.startswith("--")} <= {*theirs}

    @of(*NAMES)
    @pytest.mark.parametrize("word", ["--port", "--port=1", "--api-key", "--host", "--hostname"])
    def test_what_llmux_sets(self, server, word):
        if word.partition("=")[0] in server.adapter.config.own_options():
            (problem,) = server.problems(extra_args=[word])
            assert problem == f"extra_args: {word.partition('=')[0]} is set by llmux"

    @of(*NAMES)
    def test_what_has_a_key(self, server):
        option, key = next(iter(server.adapter.config.options().items()))
        assert server.problems(extra_args=[option]) == (f"extra_args: {option} has a key of its own, {key}",)

    @of("sglang")
    def test_abbreviated_and_underscored(self, server):
        assert server.problems(extra_args=["--served_model", "x"]) == ("extra_args: --served-model is set by llmux",)

    @of(*NAMES)
    def test_anything_else_is_passed_on(self, server):
        assert server.problems(extra_args=["--some-thing", "-1"]) == ()
        assert server.words(extra_args=["--some-thing", "-1"])[-2:] == ("--some-thing", "-1")

    @of(*NAMES)
    def test_variables(self, server):
        variable = server.adapter.key_variable
        assert server.problems(env={variable: "mine"}) == (f"env: {variable} is set by llmux",)
        assert server.problems(env={"CUDA_VISIBLE_DEVICES": "0"}) == ("env: CUDA_VISIBLE_DEVICES is set by llmux",)


class TestModel:
    """A folder that holds one."""

    @of(*NAMES)
    def test_there_is_none(self, server):
        assert server.problems(path="/nowhere") == ("path: /nowhere: there is no such folder",)
        with pytest.raises(ModelUnusableError, match="path: /nowhere"):
            server.words(path="/nowhere")

    @of(*NAMES)
    def test_context(self, server):
        assert server.adapter.capabilities(server.config()).context == 8192
        ((key, tokens),) = server.adapter.context_settings(server.config(), 1000).items()
        assert value(server.words(**{key: tokens}), server.adapter.config.flags()[key]) == "1000"


class TestFootprint:
    """Known beforehand, where the server can be told how large its cache is."""

    @of("sglang", "tabbyapi")
    def test_grows_with_the_cache(self, server):
        key = {"sglang": "max_total_tokens", "tabbyapi": "cache_size"}[server.adapter.name]
        small, large = (server.adapter.estimate(server.config(**{key: tokens})) for tokens in (8192, 16_384))
        assert small is not None
        assert large.mib - small.mib == 8192 * 36 * 8 * 128 * 2 * 2 >> 20  # layers, heads, their width, both, bytes

    @of("tabbyapi")
    @pytest.mark.parametrize(("mode", "part"), [("Q8", 8.5 / 16), ("Q4", 4.5 / 16), ("8,4", 6.5 / 16)])
    def test_narrow_values(self, server, mode, part):
        cache = [server.adapter.estimate(server.config(cache_mode=kind)).cache_mib for kind in ("FP16", mode)]
        assert cache[1] == pytest.approx(cache[0] * part, abs=1)

    @of("sglang")
    def test_the_cache_is_what_vram_mib_leaves(self, server):
        alone = server.adapter.estimate(server.config())
        words = server.words(vram_mib=alone.mib + 1000)
        tokens = int(value(words, "--max-total-tokens"))
        assert 8192 < tokens <= 8192 + 1000 * (1 << 20) // (36 * 8 * 128 * 2 * 2)
        assert server.adapter.estimate(server.config(vram_mib=alone.mib + 1000)).mib <= alone.mib + 1000

    @of("sglang")
    def test_too_little_vram(self, server):
        (problem,) = server.problems(vram_mib=100)
        assert re.match(r"vram_mib: 100 is less than the \d+ MiB that a request of 8192 tokens needs", problem)

    @of("tgi")
    def test_of_tgi_it_must_be_said(self, server):
        (problem,) = server.problems(vram_mib=None)
        assert problem.startswith("vram_mib: TGI takes its GPU, or the --cuda-memory-fraction of it")


class TestProgram:
    """The program is found in its installer's places; else the error names the remedy."""

    def test_no_sglang(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", "")
        with pytest.raises(
            RuntimeNotInstalledError, match="llmux runtimes install sglang --accelerator cuda; or set python"
        ):
            Server("sglang", tmp_path).words(python=None)

    def test_the_environment_of_sglang_goes_before_one_on_path(self, tmp_path, monkeypatch):
        (own := tmp_path / "runtimes" / "sglang" / "bin" / "python").parent.mkdir(parents=True)
        (beside := tmp_path / "on_path").mkdir()
        for program in (own, beside / "sglang", beside / "python"):
            program.symlink_to("/bin/true")
        monkeypatch.setenv("PATH", str(beside))
        assert Server("sglang", tmp_path).words(python=None)[0] == str(own)

    def test_an_sglang_on_path(self, tmp_path, monkeypatch):
        for name in ("sglang", "python"):
            (tmp_path / name).symlink_to("/bin/true")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert Server("sglang", tmp_path / "s").words(python=None)[0] == str(tmp_path / "python")

    def test_no_tgi(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", "")
        with pytest.raises(ModelUnusableError, match="runtime command"):
            Server("tgi", tmp_path).words(binary=None)

    def test_no_tabbyapi(self, tmp_path):
        server = Server("tabbyapi", tmp_path)
        problems = server.problems(folder=str(tmp_path / "model"))
        assert [problem.split(":")[0] for problem in problems] == ["python", "folder"]


class TestSeveralGpus:
    """The options and variables for a worker's devices."""

    @of("sglang", "tgi")
    def test_equal_parts(self, server):
        option = {"sglang": "--tp-size", "tgi": "--num-shard"}[server.adapter.name]
        assert value(server.words(2, gpus=2), option) == "2"
        assert option not in server.words()

    @of("tabbyapi")
    def test_parts_of_their_own(self, server):
        words = server.words(2, (5120, 10_240), gpus="auto")
        at = words.index("--gpu-split")
        assert words[at + 1 : at + 3] == ("5.0", "10.0")
        assert value(server.words(2, gpus=2), "--tensor-parallel") == "true"

    @of("tgi")
    def test_two_launchers_never_meet(self, server):
        first = server.words(2, gpus=2)
        second = server.adapter.launch(server.config(gpus=2), replace(place(server.folder, 2), port=60_000)).argv
        assert value(first, "--master-port") == "18100"
        assert value(second, "--master-port") == "50000"
        assert value(first, "--prometheus-port") == "0"


class TestTextReferences:
    """Which texts its workers follow: TGI's where the model sees, or might."""

    @of("tgi")
    def test_tgi(self, server, tmp_path):
        assert server.adapter.text_references(server.config()) is None
        for path in (hf_folder.write(tmp_path / "sees", {"vision_config": {}}), tmp_path / "not there yet"):
            found = server.adapter.text_references(server.config(path=str(path)))
            assert (found.begin, found.end) == ("![](", ")")

    @of("sglang", "tabbyapi")
    def test_others(self, server):
        assert server.adapter.text_references(server.config()) is None
