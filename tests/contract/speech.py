"""The contract's subjects that hear instead of chat."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from runtimes.registry import REGISTRY
from tests.contract.conftest import Question, Subject
from tests.support import environments, fake_whisper_server, hearing


def _form(stream: bool) -> dict[str, object]:
    sound = (hearing.sounds() / "speech.mp3").read_bytes()
    return {"data": {"model": "the-model", "stream": str(stream).lower()}, "files": {"file": ("speech.mp3", sound)}}


HEARING = Question(
    path="/v1/audio/transcriptions",
    keys=_form,
    text_of=lambda answer: answer["text"],
    delta_of=lambda event: event.get("delta", ""),
    answer=hearing.EXTENSION_FIELDS,
    takes="audio",
)
GUARDED = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/models", "/metrics")


def faster_whisper() -> Subject:
    environments.installed("faster_whisper")
    return Subject(
        name="faster_whisper",
        adapter=REGISTRY.get("faster_whisper"),
        keys={"path": str(hearing.converted()), "threads": 1},
        broken={"compute_type": "float16"},  # which no processor computes
        complaint="Requested float16 compute type",
        guarded=GUARDED,
        question=HEARING,
    )


def whisper_cpp(folder: Path) -> Subject:
    environments.installed("whisper_cpp")
    broken = folder / "ggml-broken.bin"
    broken.write_bytes(hearing.ggml().read_bytes()[:4] + bytes(60))
    return Subject(
        name="whisper_cpp",
        adapter=REGISTRY.get("whisper_cpp"),
        keys={"path": str(hearing.ggml()), "binary": str(fake_whisper_server.program(folder)), "threads": 1},
        broken={"path": str(broken)},
        complaint="before it was ready",
        guarded=GUARDED,
        question=HEARING,
    )


def transformers_asr(folder: Path) -> Subject:
    environments.installed("transformers")
    broken = shutil.copytree(hearing.whisper(), folder / "model")
    described = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**described, "num_mel_bins": 40}))
    return Subject(
        name="transformers-asr",
        adapter=REGISTRY.get("transformers"),
        keys={"type": "asr", "path": str(hearing.whisper()), "threads": 1},
        broken={"path": str(broken)},
        complaint="mismatch",
        guarded=GUARDED,
        question=HEARING,
    )
