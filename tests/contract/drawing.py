"""The contract's subjects that draw."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from runtimes.registry import REGISTRY
from tests.contract.conftest import Question, Subject
from tests.support import environments, fake_comfyui, tiny_pictures

PNG = "iVBORw0KGgo"  # its first bytes, in base64
FIELDS = {"model": "the-model", "prompt": "a cat", "size": "64x64", "steps": 2, "seed": 1}

DRAWING = Question(
    path="/v1/images/generations",
    keys=lambda stream: {"json": {**FIELDS, "stream": stream, "partial_images": int(stream)}},
    text_of=lambda answer: answer["data"][0]["b64_json"],
    delta_of=lambda event: event["b64_json"] if event["type"].endswith(".completed") else "",
    answer=PNG,
)


def diffusers(folder: Path) -> Subject:
    environments.installed("diffusers")
    model = tiny_pictures.model()
    broken = shutil.copytree(model, folder / "model")
    index = json.loads((broken / "model_index.json").read_text())
    (broken / "model_index.json").write_text(json.dumps({**index, "unet": ["diffusers", "NoSuchModel"]}))
    return Subject(
        name="diffusers",
        adapter=REGISTRY.get("diffusers"),
        keys={"path": str(model), "threads": 1},
        broken={"path": str(broken)},
        complaint="has no class `NoSuchModel`",
        guarded=("/v1/images/generations", "/v1/images/edits", "/v1/images/variations", "/v1/models", "/metrics"),
        question=DRAWING,
    )


def comfyui(folder: Path) -> Subject:
    python = environments.installed("comfyui") / "comfyui" / "bin" / "python"
    checkout = fake_comfyui.checkout(folder)
    broken = folder / "broken.json"
    broken.write_text(json.dumps({**fake_comfyui.FLOW, "9": {"class_type": "NoSuchNode", "inputs": {}}}))
    return Subject(
        name="comfyui",
        adapter=REGISTRY.get("comfyui"),
        keys={
            "folder": str(checkout),
            "python": str(python),
            "workflow": str(folder / "flow.json"),
            "inputs": fake_comfyui.INPUTS,
        },
        broken={"workflow": str(broken)},
        complaint="ComfyUI has no node NoSuchNode",
        guarded=("/v1/images/generations", "/v1/images/edits", "/v1/models", "/metrics"),
        question=DRAWING,
    )
