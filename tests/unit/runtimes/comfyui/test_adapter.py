"""The adapter of ComfyUI, without a process: a workflow's places and endpoints, and its problems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtimes import device_kind
from runtimes.base import LaunchContext, ModelUnusableError
from runtimes.comfyui.shared import workflow
from runtimes.device_kind import DeviceAssignment
from runtimes.registry import REGISTRY
from tests.support import fake_comfyui
from tests.support.cases import cases

ADAPTER = REGISTRY.get("comfyui")
GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
RUNTIMES = Path("/nowhere/runtimes")


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("comfyui")
    return {
        "runtime": "comfyui",
        "folder": str(fake_comfyui.checkout(folder)),
        "python": "/bin/true",
        "workflow": str(folder / "flow.json"),
        "inputs": fake_comfyui.INPUTS,
    }


class TestConfiguration:
    """Known before anything is started."""

    def problems(self, keys, **changed):
        return ADAPTER.check(ADAPTER.config(**{**keys, **changed}), runtimes_dir=RUNTIMES)

    def test_good(self, keys):
        assert self.problems(keys) == ()

    @cases(
        ("changed", "clue"),
        [
            ({"folder": "/nowhere"}, "folder: there is no main.py in /nowhere"),
            ({"python": None}, "python: there is no environment in "),
            ({"python": "/nowhere"}, "python: /nowhere is not a program"),
            ({"workflow": "/nowhere.json"}, "workflow: /nowhere.json can't be read"),
            ({"base_directory": "/nowhere"}, "base_directory: /nowhere: there is no such folder"),
            (
                {"inputs": {"prompt": "9.text"}},
                "there is no such node; write NODE.INPUT with one of 1 (The painter), 2",
            ),
            ({"inputs": {"prompt": "1.words"}}, "this node has no such input; it has: ckpt_name, text, seed"),
            ({"inputs": {"seed": "1.seed"}}, "inputs: the workflow has no place for a prompt"),
            ({"extra_args": ["--port", "1"]}, "extra_args: --port is set by llmux"),
            ({"extra_args": ["--listen=0.0.0.0"]}, "extra_args: --listen is set by llmux"),
        ],
        ids=str,
    )
    def test_problems(self, keys, changed, clue):
        assert [problem for problem in self.problems(keys, **changed) if clue in problem]

    @pytest.mark.parametrize(
        ("flow", "clue"),
        [
            ("{", "is not JSON"),
            ('{"nodes": [], "links": []}', "there, use Export (API)"),
            ("[]", "holds no workflow in API format"),
            ('{"1": {"class_type": "A", "inputs": {"text": "x"}}}', "it saves no picture"),
        ],
        ids=["broken", "editor", "list", "nothing-saved"],
    )
    def test_no_workflow(self, keys, tmp_path, flow, clue):
        (tmp_path / "flow.json").write_text(flow)
        found = self.problems(keys, workflow=str(tmp_path / "flow.json"), inputs={})
        assert [problem for problem in found if clue in problem]

    def test_endpoints_follow_from_the_workflow(self, keys):
        assert {each.path for each in ADAPTER.endpoints(ADAPTER.config(**keys))} == {GENERATIONS}
        changing = {**keys, "workflow": str(Path(str(keys["workflow"])).with_name("changing.json"))}
        changing["inputs"] = {**fake_comfyui.INPUTS, "image": "3.image"}
        assert {each.path for each in ADAPTER.endpoints(ADAPTER.config(**changing))} == {EDITS}

    def test_the_estimate_is_of_the_files_that_it_names(self, keys):
        config = ADAPTER.config(**keys)
        assert [path.name for path in ADAPTER.weights(config)] == ["one.safetensors"]
        assert ADAPTER.estimate(config).mib == 1202

    def test_a_launch_names_the_problem(self, keys, tmp_path):
        (python := tmp_path / "comfyui" / "bin" / "python").parent.mkdir(parents=True)
        python.touch()
        where = LaunchContext("m", "127.0.0.1", 1, "k", (DeviceAssignment("host", device_kind.HOST),), tmp_path)
        with pytest.raises(ModelUnusableError, match="folder: there is no main"):
            ADAPTER.launch(ADAPTER.config(**{**keys, "folder": "/nowhere"}), where)


USUAL = {
    "3": {
        "class_type": "KSampler",
        "inputs": {
            "seed": 5,
            "steps": 20,
            "cfg": 8,
            "denoise": 1,
            "model": ["4", 0],
            "positive": ["6", 0],
            "negative": ["7", 0],
            "latent_image": ["5", 0],
        },
    },
    "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "sd15.safetensors"}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 512, "height": 512, "batch_size": 1}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a cat", "clip": ["4", 1]}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "ugly", "clip": ["4", 1]}},
    "8": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["4", 2]}},
    "9": {"class_type": "SaveImage", "inputs": {"filename_prefix": "ComfyUI", "images": ["8", 0]}},
}


class TestPlaces:
    """Where the configuration names none, those of the usual nodes."""

    def test_of_comfyuis_default_workflow(self, tmp_path):
        (tmp_path / "flow.json").write_text(json.dumps(USUAL))
        assert workflow.read(tmp_path / "flow.json", {}).places == {
            "checkpoint": ("4", "ckpt_name"),
            "seed": ("3", "seed"),
            "steps": ("3", "steps"),
            "guidance": ("3", "cfg"),
            "strength": ("3", "denoise"),
            "prompt": ("6", "text"),
            "negative_prompt": ("7", "text"),
            "width": ("5", "width"),
            "height": ("5", "height"),
            "n": ("5", "batch_size"),
        }

    def test_what_is_between_is_passed(self, tmp_path):
        between = {"class_type": "ControlNetApply", "inputs": {"conditioning": ["6", 0], "strength": 1.0}}
        flow = {**USUAL, "10": between}
        flow["3"] = {**USUAL["3"], "inputs": {**USUAL["3"]["inputs"], "positive": ["10", 0]}}
        (tmp_path / "flow.json").write_text(json.dumps(flow))
        assert workflow.read(tmp_path / "flow.json", {}).places["prompt"] == ("6", "text")
