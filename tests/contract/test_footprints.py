"""What a worker takes was told before it was started, within 30 %: after requests as large as it serves, alone or not.

`pytest -s tests/contract/test_footprints.py` prints the table. Measured is what the daemon measures on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from runtimes.registry import REGISTRY
from supervisor.core.types import Generation, ModelId
from supervisor.host.memory.host_memory import DEVICE, HostMemory
from supervisor.host.memory.memory import HolderPids
from tests.contract import conftest, speech
from tests.contract.conftest import Question, Subject, Worker
from tests.support import environments, fake_whisper_server, hearing, minilm, seeing, tiny_language, tiny_pictures

WITHIN = 0.3
PROGRAM_MIB = (
    15  # more or less: how much of a program's file is in memory is the kernel's choice, and the builds differ
)


def told(path: str, body: dict[str, object]) -> Question:
    """A request whose answer's text is of no interest here."""
    return Question(path, lambda _stream: {"json": {"model": "the-model", **body}}, str, str, "")


COMPLETION = told("/v1/completions", {"prompt": "hello world " * 160, "max_tokens": 64})  # a letter is a token, of 2048
LETTERS = told("/v1/completions", {"prompt": "x" * 900, "max_tokens": 64})  # of 1024
BATCH = told("/v1/embeddings", {"input": ["word " * 250] * 32})  # 252 tokens each; 8192 are computed at once
PICTURES = told(
    "/v1/embeddings",
    {"input": [{"type": "image_url", "image_url": {"url": seeing.picture(64, 48, (200, 90, 10))}}] * 32},
)

SIDE = 256  # of the largest picture
PICTURE = told("/v1/images/generations", {"prompt": "a cat", "size": f"{SIDE}x{SIDE}", "steps": 1})


def long_sound() -> Question:
    sound = (hearing.sounds() / "long.ogg").read_bytes()
    keys = {"data": {"model": "the-model"}, "files": {"file": ("long.ogg", sound)}}
    return replace(speech.HEARING, keys=lambda _stream: keys)


@dataclass(frozen=True)
class Measured:
    """A worker to start, and the largest request that it serves."""

    subject: Callable[[pytest.TempPathFactory], Subject]
    largest: Callable[[], Question]
    beside: bool = True  # measured beside a second one, too: once for each program, as they share its libraries


def known(name: str) -> Callable[[pytest.TempPathFactory], Subject]:
    return lambda folders: conftest.of_workers(name, folders)


def model(runtime: str, find: Callable[[], object], **keys: object) -> Callable[[pytest.TempPathFactory], Subject]:
    def subject(_folders: pytest.TempPathFactory) -> Subject:
        environments.installed(runtime)
        return Subject(runtime, REGISTRY.get(runtime), {"path": str(find()), "threads": 1, **keys}, {}, "")

    return subject


def chatting(kind: str) -> Measured:
    return Measured(model("transformers", lambda: tiny_language.model(kind), n_ctx=1024), lambda: LETTERS, beside=False)


SUBJECTS = {  # runtime, or runtime-kind
    "llama_server": Measured(known("embedded"), lambda: COMPLETION),
    "llama_server-binary": Measured(known("binary"), lambda: COMPLETION),
    "transformers": Measured(known("transformers"), lambda: LETTERS),
    "transformers-gpt_oss": chatting("gpt_oss"),
    "transformers-qwen3_vl": chatting("qwen3_vl"),
    "transformers-asr": Measured(known("transformers-asr"), long_sound),
    "transformers-cohere": Measured(
        model("transformers", hearing.cohere, type="asr", default_language="en"), long_sound, beside=False
    ),
    "faster_whisper": Measured(known("faster_whisper"), long_sound),
    "llama_cpp": Measured(known("llama_cpp"), lambda: COMPLETION),
    "ctranslate2": Measured(known("ctranslate2"), lambda: LETTERS),
    "embeddings": Measured(model("embeddings", minilm.folder), lambda: BATCH),
    "embeddings-clip": Measured(
        model("embeddings", lambda: seeing.model("clip"), type="vision"), lambda: PICTURES, beside=False
    ),
    "diffusers": Measured(model("diffusers", tiny_pictures.model, max_pixels=SIDE**2), lambda: PICTURE),
}
if fake_whisper_server.real() is not None:
    SUBJECTS["whisper_cpp"] = Measured(known("whisper_cpp"), long_sound)
ELSEWHERE = {
    "comfyui": "its program is a stand-in here; it keeps models as it sees fit",
    "exllamav3": "needs a GPU: tests/gpu/test_exllamav3.py",
    "whisper_cpp": "its program is a stand-in here, unless LLMUX_TEST_WHISPER_SERVER names the real one",
    "sglang": "needs a GPU: its figures are checked in tests/unit/runtimes/test_server_programs.py",
    "tgi": "takes the share of a GPU that it is told",
    "tabbyapi": "needs a GPU: its figures are checked in tests/unit/runtimes/test_server_programs.py",
    "chatterbox": "test_the_real_library of tests/e2e/runtimes/test_chatterbox.py (make test-chatterbox)",
    "vllm_serve": "tests/e2e/runtimes/test_vllm.py (make test-vllm)",
    "vllm": "tests/e2e/runtimes/test_vllm_worker.py (make test-vllm)",
    "command": "anybody's program: nothing to compute from but its files",
    "openai_remote": "takes no memory",
    "claude_cli": "takes none that is managed: its program reaches a service of others",
}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.binary] * name.endswith("binary")) for name in SUBJECTS])
def measured(request, tmp_path_factory) -> tuple[Subject, Question, bool]:
    found = SUBJECTS[request.param]
    return found.subject(tmp_path_factory), found.largest(), found.beside


def taken(*workers: Worker) -> list[int]:
    """MiB of each, from one reading."""
    holders = {
        (ModelId(str(worker.process.pid)), Generation(1)): HolderPids((DEVICE,), (worker.process.pid,), loading=False)
        for worker in workers
    }
    return [sample.used_mib or 0 for sample in HostMemory().read(holders).workers]


def test_estimate(measured, start, request, record_property):
    subject, largest, is_beside = measured
    estimate = subject.adapter.estimate(subject.config())
    assert estimate is not None
    worker = start(subject).wait_ready()
    (loaded,) = taken(worker)
    for _ in range(2):
        answer = worker.ask(largest)
        assert answer.status_code == 200, answer.text
    (alone,) = taken(worker)
    beside, rested = [], 0
    if is_beside:
        other = start(subject, conftest.place()).wait_ready()
        assert other.ask(largest).status_code == 200
        rested, *beside = taken(worker, other)  # the first one has had the time to give back what it doesn't need
    figures = {"estimate": estimate.mib, "loaded": loaded, "alone": alone, "rested": rested, "beside": beside}
    for name, figure in figures.items():
        record_property(f"{name}_mib", figure)
    off = ", ".join(f"{estimate.mib / mib - 1:+.0%}" for mib in (loaded, alone, *beside))
    print(f"\n{request.node.callspec.id}: {figures} MiB ({off}); {estimate.detail}")
    assert loaded * (1 - WITHIN) <= estimate.mib, "it is never less than what a worker takes before its first request"
    assert rested - estimate.mib <= max(WITHIN * rested, PROGRAM_MIB), "at rest it never takes more than foretold"
    for mib in (alone, *beside):
        assert abs(estimate.mib - mib) <= max(WITHIN * mib, PROGRAM_MIB), estimate.detail
