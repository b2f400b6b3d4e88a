"""One subject of the contract for each runtime: how to configure it for a good model and for a broken one."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil
import pytest
from pydantic import JsonValue

from runtimes import device_kind
from runtimes.base import LaunchContext, LaunchSpec
from runtimes.device_kind import DeviceAssignment
from runtimes.exllamav3.adapter import ExLlamaV3Adapter, ExLlamaV3Config
from runtimes.registry import REGISTRY, AnyAdapter
from runtimes.vllm.adapter import VllmWorkerAdapter
from runtimes.vllm.adapter.config import VllmWorkerConfig
from tests.support import (
    build_llama_cpp,
    contributing,
    fake_exllamav3,
    fake_servers,
    fake_vllm_engine,
    hf_folder,
    tiny,
    tiny_ctranslate2,
    tiny_language,
)
from tests.support.daemon import wait_until
from tests.support.limits import LIMIT_S
from tests.support.ports import quiet_ports

FAKE = Path(__file__).parents[1] / "support" / "fake_worker.py"
BASE_ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


@dataclass(frozen=True)
class Question:
    """A request that every worker of a kind answers with a text that begins with `answer`, whole or as a stream."""

    path: str
    keys: Callable[[bool], dict[str, object]]  # httpx's; told whether to stream
    text_of: Callable[[dict], str]  # the whole answer's text
    delta_of: Callable[[dict], str]  # what an event of a stream adds to it
    answer: str
    takes: str = "text"


def _chat_delta(event: dict) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _chat_text(answer: dict) -> str:
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


CHAT = {"model": "the-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
CHATTING = Question(
    path="/v1/chat/completions",
    keys=lambda stream: {"json": {**CHAT, "stream": stream}},
    text_of=_chat_text,
    delta_of=_chat_delta,
    answer="Hello from a",
)


@dataclass(frozen=True)
class Subject:
    """A runtime as its users configure it. `broken` are keys that make a start fail; `complaint` is in its log then."""

    name: str
    adapter: AnyAdapter
    keys: dict[str, object]
    broken: dict[str, object]
    complaint: str
    guarded: tuple[str, ...] = ("/v1/chat/completions",)  # refused without the key
    question: Question = CHATTING

    def config(self, **keys: object):
        return self.adapter.config(runtime=self.adapter.name, **{**self.keys, **keys})


@dataclass
class Worker:
    spec: LaunchSpec
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.spec.host}:{self.spec.port}"

    def headers(self) -> dict[str, str]:
        return {"Authorization": self.spec.auth} if self.spec.auth else {}

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return httpx.post(
            self.url + path, json=body, headers=headers or self.headers(), timeout=LIMIT_S, trust_env=False
        )

    def ask(self, question: Question, *, stream: bool = False, **more: str) -> httpx.Response:
        """`more` are fields beside the question's."""
        keys = {
            name: {**part, **more} if name in {"json", "data"} else part for name, part in question.keys(stream).items()
        }
        return httpx.post(self.url + question.path, headers=self.headers(), timeout=LIMIT_S, trust_env=False, **keys)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers(), timeout=LIMIT_S, trust_env=False)

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self.spec.host, self.spec.port)) == 0

    def wait_ready(self) -> Worker:
        wait_until(self._is_ready, what=f"the worker is ready; its log: {self.log}")
        return self

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return all(self.get(path).is_success for path in (self.spec.health.path, self.spec.health.then) if path)
        return False


def llama(program: str) -> Subject:
    keys: dict[str, object] = {"path": str(tiny.model()), "n_ctx": 2048, "threads": 1}
    if program == "embedded":
        tiny.runtimes_dir()
        keys |= {"program": "embedded"}
    else:
        keys |= {"binary": str(tiny.llama_server())}
    return Subject(
        name=program,
        adapter=REGISTRY.get("llama_server"),
        keys=keys,
        broken={"path": str(FAKE)},
        complaint="exiting due to model loading error",
        guarded=("/v1/chat/completions", "/v1/embeddings", "/completion", "/props", "/slots"),
    )


def fake() -> Subject:
    words = [sys.executable, "-I", "-S", str(FAKE), "--host", "${host}", "--port", "${port}", "--name", "${model}"]
    return Subject(
        name="command",
        adapter=REGISTRY.get("command"),
        keys={"cmd": [*words, "--key-env", "LLMUX_WORKER_KEY"], "auth": "bearer"},
        broken={"cmd": [*words, "--exit-code", "1", "--log-text", "no such model"]},
        complaint="no such model",
    )


def vllm(folder: Path) -> Subject:
    return Subject(
        name="vllm_serve",
        adapter=REGISTRY.get("vllm_serve"),
        keys={"path": str(hf_folder.write(folder / "model")), "binary": str(fake_servers.vllm(folder))},
        broken={"quantization": "none-such"},
        complaint="Unknown quantization method: none-such",
    )


def other_server(name: str, folder: Path) -> Subject:
    """A runtime on another project's server, which is a stand-in here."""
    model, broken = hf_folder.write(folder / "model"), hf_folder.write(folder / "broken")
    described = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**described, "architectures": ["NoSuchForCausalLM"]}))
    keys = {
        "tgi": lambda: {"binary": str(fake_servers.tgi(folder)), "vram_mib": 9000},
        "sglang": lambda: {"python": str(fake_servers.sglang(folder))},
        "tabbyapi": lambda: {"folder": str(fake_servers.tabbyapi(folder))},
    }[name]()
    return Subject(
        name=name,
        adapter=REGISTRY.get(name),
        keys={"path": str(model), **keys},
        broken={"path": str(broken)},
        complaint="NoSuchForCausalLM",
    )


class Standing(VllmWorkerAdapter):
    """With the environments of another folder than all others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def launch(self, config: VllmWorkerConfig, context: LaunchContext) -> LaunchSpec:
        return super().launch(config, replace(context, runtimes_dir=self._folder))


def vllm_worker(folder: Path) -> Subject:
    """Our worker; a stand-in has vLLM's interface."""
    fake_vllm_engine.environment(folder / "vllm")
    return Subject(
        name="vllm",
        adapter=Standing(folder),
        keys={"path": str(tiny_language.model()), "max_model_len": 1024, "max_num_seqs": 4},
        broken={"quantization": "none-such"},
        complaint="Unknown quantization method: none-such",
        guarded=("/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics"),
    )


def transformers(folder: Path) -> Subject:
    model = tiny_language.model()
    broken = shutil.copytree(model, folder / "model")
    described = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**described, "architectures": ["NoSuchForCausalLM"]}))
    return Subject(
        name="transformers",
        adapter=REGISTRY.get("transformers"),
        keys={"path": str(model), "n_ctx": 1024, "threads": 1},
        broken={"path": str(broken)},
        complaint="has no such language model",
        guarded=("/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics"),
    )


class WithoutCuda(ExLlamaV3Adapter):
    """With a stand-in for the library, which needs no GPU, in an environment of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def options(self, config: ExLlamaV3Config, context: LaunchContext) -> Mapping[str, JsonValue]:
        gpu = DeviceAssignment("gpu0", device_kind.CUDA, 0, "GPU-0")
        return super().options(config, replace(context, devices=(gpu,)))

    def launch(self, config: ExLlamaV3Config, context: LaunchContext) -> LaunchSpec:
        return super().launch(config, replace(context, runtimes_dir=self._folder))


def exllamav3(folder: Path) -> Subject:
    """Our worker; a stand-in has the library's interface."""
    fake_exllamav3.environment(folder / "exllamav3")
    model = tiny_language.model()
    broken = shutil.copytree(model, folder / "model")
    described = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**described, "architectures": ["NoSuchForCausalLM"]}))
    return Subject(
        name="exllamav3",
        adapter=WithoutCuda(folder),
        keys={"path": str(model), "cache_size": 1024, "cache_quant": 8, "threads": 1},
        broken={"path": str(broken)},
        complaint="Unknown architecture NoSuchForCausalLM",
        guarded=("/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics"),
    )


def llama_cpp(folder: Path) -> Subject:
    if build_llama_cpp.find() is None:
        pytest.skip(build_llama_cpp.MISSING)
    whole, cut = tiny.model().read_bytes(), folder / "cut.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    return Subject(
        name="llama_cpp",
        adapter=REGISTRY.get("llama_cpp"),
        keys={"path": str(tiny.model()), "n_ctx": 2048, "threads": 1},
        broken={"path": str(cut)},
        complaint="could not be loaded",
        guarded=("/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics"),
    )


def ctranslate2(folder: Path) -> Subject:
    model = tiny_ctranslate2.language()
    broken = shutil.copytree(model, folder / "model")
    (broken / "vocabulary.json").unlink()
    return Subject(
        name="ctranslate2",
        adapter=REGISTRY.get("ctranslate2"),
        keys={"path": str(model), "n_ctx": 1024, "threads": 1},
        broken={"path": str(broken)},
        complaint="vocabulary",
        guarded=("/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics"),
    )


def remote() -> Subject:
    """No process: what the contract says of configurations holds for it, what it says of workers is in tests/e2e/remote."""
    return Subject(
        name="openai_remote",
        adapter=REGISTRY.get("openai_remote"),
        keys={"base_url": "https://api.example.com/v1", "upstream_model": "theirs", "api_key_env": "THEIR_KEY"},
        broken={"ca_file": str(FAKE.with_name("no-such-file.pem"))},
        complaint="there is no such file",
    )


def program(folder: Path) -> Subject:
    """A program that a worker of ours runs for each request."""
    command = [sys.executable, "-I", "-S", str(FAKE.with_name("fake_cli.py")), "text", str(folder)]
    return Subject(
        name="claude_cli",
        adapter=REGISTRY.get("claude_cli"),
        keys={"command": command, "output": "text", "upstream_model": "theirs"},
        broken={},
        complaint="",
        guarded=("/v1/chat/completions", "/v1/models", "/metrics"),
        question=replace(CHATTING, answer="You said: hi"),
    )


def contributed(folder: Path) -> Subject:
    """The runtime that CONTRIBUTING.md adds; its server is a fake worker."""
    program, model, broken = folder / "server", folder / "model", folder / "broken"
    program.write_text(
        f"""#!/bin/sh
        grep -q weights "$2" || {{ echo "$2: no weights in it"; exit 1; }}
        shift 2
        exec {sys.executable} -I -S {FAKE} "$@" --key-env {contributing.NAME.upper()}_API_KEY
        """
    )
    program.chmod(0o755)
    model.write_text("weights")
    broken.touch()
    return Subject(
        name="contributed",
        adapter=contributing.registry().get(contributing.NAME),
        keys={"path": str(model), "binary": str(program)},
        broken={"path": str(broken)},
        complaint="no weights in it",
    )


SUBJECTS = {
    "llama_server": ["embedded", pytest.param("binary", marks=pytest.mark.binary)],
    "command": ["command"],
    "vllm_serve": ["vllm_serve"],
    "vllm": ["vllm"],
    "transformers": ["transformers", "transformers-asr"],
    "faster_whisper": ["faster_whisper"],
    "whisper_cpp": ["whisper_cpp"],
    "sglang": ["sglang"],
    "tgi": ["tgi"],
    "tabbyapi": ["tabbyapi"],
    "ctranslate2": ["ctranslate2"],
    "exllamav3": ["exllamav3"],
    "diffusers": ["diffusers"],
    "comfyui": ["comfyui"],
    "llama_cpp": ["llama_cpp"],
    "claude_cli": ["claude_cli"],
}
"""Every runtime that has workers, with its subjects."""

ELSEWHERE = {
    "embeddings": "tests/e2e/runtimes/test_embeddings.py",
    "chatterbox": "tests/e2e/runtimes/test_chatterbox.py",
    "openai_remote": "has no workers; tests/e2e/remote",
}
REMOTES = {"openai_remote": remote}
RUNTIMES = [subject for subjects in SUBJECTS.values() for subject in subjects] + ["contributed"]


@pytest.fixture(scope="session", params=RUNTIMES)
def subject(request, tmp_path_factory) -> Subject:
    """Every runtime that has workers in turn."""
    return of_workers(request.param, tmp_path_factory)


def of_workers(name: str, folders: pytest.TempPathFactory) -> Subject:
    if name == "vllm_serve":
        return vllm(folders.mktemp("vllm"))
    if name == "vllm":
        return vllm_worker(folders.mktemp("vllm_worker"))
    if name in {"sglang", "tgi", "tabbyapi"}:
        return other_server(name, folders.mktemp(name))
    if name == "transformers":
        return transformers(folders.mktemp("transformers"))
    if name == "exllamav3":
        return exllamav3(folders.mktemp("exllamav3"))
    if name == "llama_cpp":
        return llama_cpp(folders.mktemp("llama_cpp"))
    if name == "ctranslate2":
        return ctranslate2(folders.mktemp("ctranslate2"))
    if name == "claude_cli":
        return program(folders.mktemp("claude_cli"))
    if name == "contributed":
        return contributed(folders.mktemp("contributed"))
    if name in {"transformers-asr", "faster_whisper", "whisper_cpp"}:
        from tests.contract import speech  # which takes its questions and subjects from here

        if name == "faster_whisper":
            return speech.faster_whisper()
        make = speech.transformers_asr if name == "transformers-asr" else speech.whisper_cpp
        return make(folders.mktemp("asr"))
    if name in {"diffusers", "comfyui"}:
        from tests.contract import drawing

        make = drawing.diffusers if name == "diffusers" else drawing.comfyui
        return make(folders.mktemp(name))
    return fake() if name == "command" else llama(name)


@pytest.fixture(scope="session", params=[*RUNTIMES, *REMOTES])
def runtime(request, tmp_path_factory) -> Subject:
    """Every runtime in turn, those without workers too."""
    return REMOTES[request.param]() if request.param in REMOTES else of_workers(request.param, tmp_path_factory)


@pytest.fixture(scope="session", params=["embedded", pytest.param("binary", marks=pytest.mark.binary)])
def llama_server(request) -> Subject:
    """Both programs of the llama_server runtime in turn."""
    return llama(request.param)


@pytest.fixture
def context() -> LaunchContext:
    return place()


def place() -> LaunchContext:
    """Where one more worker can listen."""
    port = quiet_ports()
    return LaunchContext(
        model="the-model",
        host="127.0.0.1",
        port=port,
        key=secrets.token_hex(32),
        devices=(DeviceAssignment("host", device_kind.HOST),),
        runtimes_dir=tiny.CACHE / "runtimes",
    )


Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path) -> Iterator[Start]:
    """Start a worker of a subject from its launch spec alone; killed at the end."""
    with starting(tmp_path) as start:
        yield start


@pytest.fixture
def placed(subject) -> None:
    """It has a device, and files to load."""
    if subject.adapter.remote:
        pytest.skip("others run its models")


@pytest.fixture(scope="module")
def worker(subject, tmp_path_factory) -> Iterator[Worker]:
    """One of each subject, ready, for all tests that leave it as it is."""
    with starting(tmp_path_factory.mktemp("worker")) as start:
        yield start(subject).wait_ready()


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """What starts workers, with their logs in this folder; they are killed at the end."""
    workers: list[Worker] = []

    def spawn(subject: Subject, where: LaunchContext | None = None, **keys: object) -> Worker:
        spec = subject.adapter.launch(subject.config(**keys), where or place())
        log = folder / f"worker-{len(workers)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                spec.argv,
                env={**BASE_ENVIRONMENT, **spec.env, "LLMUX_CONTRACT": str(folder)},
                cwd=spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        workers.append(Worker(spec, process, log))
        return workers[-1]

    try:
        yield spawn
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
        for pid in _marked(f"LLMUX_CONTRACT={folder}"):  # no shim looks after what they started
            with contextlib.suppress(ProcessLookupError):  # it was about to end with its parent
                os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> Iterator[int]:
    for process in psutil.process_iter():
        try:
            if mark in (f"{name}={value}" for name, value in process.environ().items()):
                yield process.pid
        except (psutil.Error, OSError):
            continue
