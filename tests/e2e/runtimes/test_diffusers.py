"""The diffusers runtime: what it says of a pipeline's folder, and real workers on tiny pipelines of each kind."""

from __future__ import annotations

import http.client
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from PIL import Image, ImageChops

from runtimes.device_kind import CUDA, DeviceAssignment
from runtimes.diffusers.adapter import DiffusersAdapter, DiffusersConfig
from runtimes.diffusers.worker.request import STRENGTHS
from tests.contract.conftest import Subject, Worker, place, starting
from tests.support import environments, tiny_pictures
from tests.support.daemon import wait_until
from tests.support.limits import LIMIT_S
from tests.support.tiny_pictures import opened, png

ADAPTER = DiffusersAdapter()
SMALL = {"prompt": "a cat", "size": "64x64", "steps": 3, "seed": 1}
LONG = {**SMALL, "steps": 200, "n": 10}


def config(**keys: object) -> DiffusersConfig:
    return DiffusersConfig(runtime="diffusers", **{"path": str(tiny_pictures.model()), **keys})


def problems(**keys: object) -> str:
    return " ".join(ADAPTER.check(config(**keys), runtimes_dir=Path()))


@pytest.fixture
def changed(tmp_path):
    """A copy of the folder of Stable Diffusion, with these parts in its index; None takes one out."""

    def change(**parts: object) -> Path:
        folder = shutil.copytree(tiny_pictures.model(), tmp_path / "model")
        index = json.loads((folder / "model_index.json").read_text()) | parts
        index = {name: value for name, value in index.items() if value is not None}
        (folder / "model_index.json").write_text(json.dumps(index))
        return folder

    return change


class TestAdapter:
    """What a folder can be used for is read from it, and nothing in it is run."""

    def test_a_pipeline(self):
        assert problems() == ""
        assert config().type == "image"
        assert ADAPTER.capabilities(config()).architecture == "StableDiffusionPipeline"
        assert {endpoint.path.rpartition("/")[2] for endpoint in ADAPTER.endpoints(config())} == set(
            map("{}s".format, STRENGTHS)
        )

    @pytest.mark.parametrize(
        ("parts", "said"),
        [
            ({"_class_name": ["pipeline", "Mine"]}, "code of a model's own is never run"),
            ({"unet": ["my_unet", "MyUnet"]}, "unet comes from 'my_unet', and code of a model's own is never run"),
            ({"../unet": ["diffusers", "UNet2DConditionModel"]}, "code of a model's own is never run"),
        ],
    )
    def test_code_of_its_own_is_refused(self, changed, parts, said):
        assert said in problems(path=str(changed(**parts)))

    def test_no_pipeline(self, tmp_path):
        assert "there is no such folder" in problems(path=str(tmp_path / "none"))
        assert "is it the folder of a diffusers pipeline?" in problems(path=str(tmp_path))
        (tmp_path / "sdxl.safetensors").touch()
        assert "single file" in problems(path=str(tmp_path / "sdxl.safetensors"))
        assert ADAPTER.estimate(config(path=str(tmp_path))) is None

    def test_weights_that_may_hold_code_are_refused(self, changed):
        folder = changed()
        (folder / "unet" / "diffusion_pytorch_model.safetensors").rename(folder / "unet" / "pytorch_model.bin")
        assert "unet has no weights (*.safetensors)" in problems(path=str(folder))

    def test_a_variant_needs_its_files(self, changed):
        folder = changed()
        assert "no weights of 'fp16'" in problems(path=str(folder), variant="fp16")
        unet = folder / "unet" / "diffusion_pytorch_model.safetensors"
        unet.rename(unet.with_suffix(".fp16.safetensors"))
        assert problems(path=str(folder), variant="fp16") == ""
        assert unet.with_suffix(".fp16.safetensors") in ADAPTER.weights(config(path=str(folder), variant="fp16"))

    def test_keys_that_do_not_fit_the_model(self):
        assert "has only its own scheduler" in problems(path=str(tiny_pictures.model("flux")), scheduler="euler")
        assert "safety_checker: there is none" in problems(safety_checker=True)
        assert "no such .safetensors file" in problems(lora="/none.safetensors")
        assert "one GPU" in problems(offload="model", gpus=2)

    def test_larger_pictures_take_more_and_tiles_less(self):
        small, large, tiled = (
            ADAPTER.estimate(config(**keys)).mib
            for keys in ({"max_pixels": 1 << 20}, {"max_pixels": 1 << 24}, {"max_pixels": 1 << 24, "vae_tiling": True})
        )
        assert large - small > 1000
        assert tiled < large - 1000

    def test_on_several_gpus_the_parts_are_balanced(self):
        gpus = tuple(DeviceAssignment(f"gpu{place}", CUDA, place, f"GPU-{place}") for place in range(2))
        options = ADAPTER.options(config(gpus=2), replace(place(), devices=gpus))
        assert (options["device"], options["device_map"]) == ("cuda", "balanced")
        one = ADAPTER.options(config(), replace(place(), devices=gpus[:1]))
        assert one["device_map"] is None
        assert ADAPTER.estimate(config(gpus=2)).mib > 1.9 * ADAPTER.estimate(config()).mib  # the program counts twice


# ------------------------------------------------------------------------------------------------------------ real workers


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    environments.installed("diffusers")
    with starting(tmp_path_factory.mktemp("workers")) as started:

        def of(kind: str, **keys: object) -> Worker:
            path = str(tiny_pictures.model(kind))
            keys = {"path": path, "threads": 1, "max_pixels": 1 << 18, **keys}
            return started(Subject("diffusers", ADAPTER, keys, {}, "")).wait_ready()

        yield of


@pytest.fixture(scope="module")
def worker(start) -> Worker:
    """Stable Diffusion 1.5."""
    return start("sd")


def drawn(worker: Worker, **fields: object) -> list[Image.Image]:
    answer = worker.post("/v1/images/generations", {**SMALL, **fields})
    assert answer.status_code == 200, answer.text
    return [opened(item["b64_json"]) for item in answer.json()["data"]]


def refused(worker: Worker, **fields: object) -> dict:
    answer = worker.post("/v1/images/generations", {**SMALL, **fields})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def sent(worker: Worker, path: str, files: object, **fields: object) -> httpx.Response:
    url = f"{worker.url}/v1/images/{path}"
    data = {name: str(value) for name, value in {"prompt": "a hat", "steps": 4, "seed": 1, **fields}.items() if value}
    return httpx.post(url, headers=worker.headers(), data=data, files=files, timeout=LIMIT_S, trust_env=False)


def streamed(worker: Worker, **fields: object) -> Iterator[dict]:
    answer = worker.post("/v1/images/generations", {**SMALL, "stream": True, **fields})
    *blocks, end = answer.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    for block in blocks:
        if block.startswith(": "):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


def is_same(one: Image.Image, other: Image.Image) -> bool:
    return one.size == other.size and ImageChops.difference(one.convert("RGB"), other.convert("RGB")).getbbox() is None


class TestGenerations:
    """A prompt becomes pictures: those of its seed, in the size and format that were asked for."""

    def test_a_seed_is_a_picture(self, worker):
        (first,), (again,), (other,) = drawn(worker), drawn(worker), drawn(worker, seed=2)
        assert first.size == (64, 64)
        assert is_same(first, again)
        assert not is_same(first, other)
        assert not is_same(first, drawn(worker, prompt="a dog")[0])

    def test_each_of_several_has_its_own_seed_which_is_told(self, worker):
        answer = worker.post("/v1/images/generations", {**SMALL, "n": 2, "seed": -1}).json()
        seeds = [item["seed"] for item in answer["data"]]
        assert seeds[1] == (seeds[0] + 1) % (1 << 32)
        assert is_same(opened(answer["data"][1]["b64_json"]), drawn(worker, seed=seeds[1])[0])

    def test_the_answer_says_what_was_made(self, worker):
        answer = worker.post("/v1/images/generations", {**SMALL, "size": "96x64", "n": 2, "quality": "low"}).json()
        assert {answer[name] for name in ("size", "quality", "output_format", "background")} == {
            *("96x64", "low", "png", "opaque")
        }
        assert answer["usage"] == {
            "total_tokens": 6 + 2 * 24,
            "input_tokens": 6,
            "output_tokens": 2 * 24,  # of 16x16 points each
            "input_tokens_details": {"text_tokens": 6, "image_tokens": 0},
        }

    @pytest.mark.parametrize(("kind", "name"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
    def test_formats(self, worker, kind, name):
        assert drawn(worker, output_format=kind)[0].format == name

    def test_more_compression_makes_a_smaller_file(self, worker):
        sizes = [
            len(
                worker.post(
                    "/v1/images/generations", {**SMALL, "output_format": "jpeg", "output_compression": compression}
                ).json()["data"][0]["b64_json"]
            )
            for compression in (10, 90)
        ]
        assert sizes[0] < sizes[1]

    def test_the_size_it_was_made_for(self, worker):
        assert drawn(worker, size="auto")[0].size == (64, 64)

    def test_what_is_not_wanted_counts(self, worker):
        assert not is_same(drawn(worker)[0], drawn(worker, negative_prompt="a dog")[0])
        assert not is_same(drawn(worker)[0], drawn(worker, guidance=3)[0])

    def test_a_prompt_that_is_too_long_is_told_as_it_was_read(self, worker):
        answer = worker.post("/v1/images/generations", {**SMALL, "prompt": "abcdefghi " * 20}).json()
        (item,) = answer["data"]
        assert "abcdefghi".startswith(item["revised_prompt"].split()[-1])
        assert len(item["revised_prompt"]) < 100
        assert answer["usage"]["input_tokens"] == 77
        assert "revised_prompt" not in worker.post("/v1/images/generations", SMALL).json()["data"][0]

    @pytest.mark.parametrize(
        ("fields", "param", "said"),
        [
            ({"size": "65x64"}, "size", "multiples of 8"),
            ({"size": "16x16"}, "size", "at least 64"),
            ({"size": "large"}, "size", "WIDTHxHEIGHT"),
            ({"size": "\N{ARABIC-INDIC DIGIT SIX}4x64"}, "size", "WIDTHxHEIGHT"),
            ({"size": "4096x4096"}, "size", "max_pixels"),
            ({"size": "128000x64000"}, "size", "max_pixels"),
            ({"n": 11}, "n", "from 1 to 10"),
            ({"seed": 1 << 40}, "seed", "from -1 to 4294967295"),
            ({"steps": 0}, "steps", "from 1 to 200"),
            ({"prompt": " "}, "prompt", "needed"),
            ({"prompt": "a" * 32_001}, "prompt", "32000 are the most"),
            ({"negative_prompt": "a" * 32_001}, "negative_prompt", "32000 are the most"),
            ({"background": "transparent"}, "background", "opaque"),
            ({"output_format": "gif"}, "output_format", "png, jpeg, webp"),
            ({"output_compression": 50}, "output_compression", "PNG loses nothing"),
            ({"partial_images": 2}, "partial_images", "stream: true"),
            ({"stream": True, "partial_images": 4}, "partial_images", "from 0 to 3"),
            ({"stream": True, "response_format": "url"}, "response_format", "leave out url"),
            ({"strength": 0.5}, "strength", "/v1/images/edits"),
            ({"true_cfg": 4}, "true_cfg", "guidance"),
            ({"guidance": 1, "negative_prompt": "x"}, "negative_prompt", "no effect"),
        ],
        ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
    )
    def test_what_it_cannot_do_is_refused_by_name(self, worker, fields, param, said):
        error = refused(worker, **fields)
        assert error["param"] == param
        assert said in error["message"]


class TestStream:
    """OpenAI's events: pictures of what is there, at even steps, then the picture."""

    def test_partial_pictures_then_the_whole(self, worker):
        events = list(streamed(worker, steps=6, partial_images=2))
        assert [event["type"].rpartition(".")[2] for event in events] == ["partial_image", "partial_image", "completed"]
        assert [event.get("partial_image_index") for event in events] == [0, 1, None]
        assert events[-1]["usage"]["output_tokens"] == 16
        pictures = [opened(event["b64_json"]) for event in events]
        assert not is_same(pictures[0], pictures[1])
        assert is_same(pictures[2], drawn(worker, steps=6)[0])

    def test_a_comment_for_each_step(self, worker):
        """So that a connection isn't silent for the minutes that a picture may take."""
        answer = worker.post("/v1/images/generations", {**SMALL, "stream": True, "n": 2})
        blocks = [block.split(":")[1].split("\n")[0].strip() for block in answer.text.split("\n\n")[:8]]
        steps = [f"step {step} of 6" for step in range(1, 7)]
        assert blocks == [*steps[:3], "image_generation.completed", *steps[3:], "image_generation.completed"]

    def test_each_of_several_is_completed(self, worker):
        events = list(streamed(worker, n=2))
        assert [(event["type"], event["seed"]) for event in events] == [
            ("image_generation.completed", 1),
            ("image_generation.completed", 2),
        ]


class TestEdits:
    """A picture becomes another: the whole of it, or what a mask leaves open."""

    def test_a_picture_is_changed_in_its_own_size(self, worker):
        answer = sent(worker, "edits", {"image": ("a.png", png((100, 70)))})
        assert answer.status_code == 200, answer.text
        assert opened(answer.json()["data"][0]["b64_json"]).size == (96, 64)
        assert answer.json()["usage"]["input_tokens_details"]["image_tokens"] == 24

    def test_a_picture_in_a_list_and_as_webp(self, worker):
        file = Path(worker.log).with_name("picture.webp")
        Image.new("RGB", (64, 64), "teal").save(file)
        answer = sent(worker, "edits", [("image[]", ("a.webp", file.read_bytes()))])
        assert answer.status_code == 200, answer.text

    def test_the_less_strength_the_more_of_it_is_left(self, worker):
        files = {"image": ("a.png", png(color="teal"))}
        weak, strong = (
            opened(sent(worker, "edits", files, strength=strength, steps=10).json()["data"][0]["b64_json"])
            for strength in (0.1, 1)
        )
        assert not is_same(weak, strong)

    def test_only_what_the_mask_leaves_open_is_drawn(self, worker):
        """A decoder that is random shows no colours, but what is kept is the same whatever the seed."""
        mask = Image.new("RGBA", (64, 128), (0, 0, 0, 255))
        mask.paste((0, 0, 0, 0), (0, 64, 64, 128))  # the lower half
        file = Path(worker.log).with_name("mask.png")
        mask.save(file)
        files = {"image": ("a.png", png((64, 128))), "mask": ("m.png", file.read_bytes())}
        one, other = (
            opened(sent(worker, "edits", files, seed=seed).json()["data"][0]["b64_json"]).convert("RGB")
            for seed in (1, 2)
        )
        upper, lower = (0, 0, 64, 32), (0, 64, 64, 128)
        far = ImageChops.difference(one.crop(upper), other.crop(upper))
        near = ImageChops.difference(one.crop(lower), other.crop(lower))
        assert sum(band[1] for band in far.getextrema()) < sum(band[1] for band in near.getextrema()) / 2

    def test_a_variation_needs_no_prompt(self, worker):
        answer = sent(worker, "variations", {"image": ("a.png", png())}, prompt=None, n=2)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"]) == 2

    def test_it_streams(self, worker):
        answer = sent(worker, "edits", {"image": ("a.png", png())}, stream="true", partial_images=1)
        assert re.findall(r"event: (\S+)", answer.text) == ["image_edit.partial_image", "image_edit.completed"]

    @pytest.mark.parametrize(
        ("path", "files", "fields", "param"),
        [
            ("edits", {"mask": ("m.png", png())}, {}, "image"),
            ("edits", [("image[]", ("a.png", png())), ("image[]", ("b.png", png()))], {}, "image"),
            ("edits", {"image": ("a.png", b"GIF89a")}, {}, "image"),
            ("edits", {"image": ("a.png", png()), "mask": ("m.png", png((32, 64)))}, {}, "mask"),
            ("edits", {"image": ("a.png", png())}, {"prompt": None}, "prompt"),
            ("edits", {"image": ("a.png", png())}, {"strength": 0.01}, "strength"),
            ("edits", {"picture": ("a.png", png())}, {}, "picture"),
            ("variations", {"image": ("a.png", png()), "mask": ("m.png", png())}, {}, "mask"),
        ],
        ids=["no image", "two images", "no picture", "another size", "no prompt", "no step", "another field", "a mask"],
    )
    def test_what_it_cannot_do_is_refused_by_name(self, worker, path, files, fields, param):
        answer = sent(worker, path, files, **fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


class TestSteps:
    """How far a request is can be asked, and it stops at its next step when its client has gone."""

    @staticmethod
    def steps(worker: Worker) -> int:
        return int(float(re.search(r"\nllmux_worker_steps_total (\S+)", worker.get("/metrics").text)[1]))

    @staticmethod
    def progress(worker: Worker) -> dict[str, dict[str, int]]:
        return worker.get("/progress").json()["requests"]

    def test_a_client_that_leaves_frees_the_model(self, worker):
        before = self.steps(worker)
        client = http.client.HTTPConnection(worker.spec.host, worker.spec.port)
        headers = {**worker.headers(), "x-request-id": "req_1", "content-type": "application/json"}
        client.request("POST", "/v1/images/generations", json.dumps(LONG), headers)
        wait_until(lambda: self.progress(worker).get("req_1", {}).get("step"), what="a step was made")
        client.close()
        wait_until(lambda: "llmux_worker_running 0.0" in worker.get("/metrics").text, what="the model is free")
        assert self.progress(worker) == {}
        assert 0 < self.steps(worker) - before < 2000
        assert drawn(worker)

    def test_progress_is_told_by_request(self, worker):
        headers = {**worker.headers(), "x-request-id": "req_2"}
        url = f"{worker.url}/v1/images/generations"
        body = {**LONG, "stream": True, "n": 2, "steps": 100, "partial_images": 1}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=LIMIT_S, trust_env=False) as answer:
            assert next(line for line in answer.iter_lines() if line.startswith("event: ")).endswith(".partial_image")
            told = self.progress(worker)["req_2"]
        assert told["steps"] == 200
        assert 50 <= told["step"] <= 200
        wait_until(lambda: "llmux_worker_running 0.0" in worker.get("/metrics").text, what="the model is free")


@pytest.mark.parametrize("kind", ["sdxl", "sd3", "flux", "schnell"])
def test_other_kinds_do_the_same_and_refuse_what_they_lack_by_name(start, kind):
    worker = start(kind)
    (first,), (again,) = drawn(worker), drawn(worker)
    assert is_same(first, again)
    files = {"image": ("a.png", png((96, 64)))}
    for each in (files, {**files, "mask": ("m.png", png((96, 64), (0, 0, 0, 0)))}):
        answer = sent(worker, "edits", each)
        assert answer.status_code == 200, answer.text
        assert opened(answer.json()["data"][0]["b64_json"]).size == (96, 64)
    partial, whole = streamed(worker, steps=4, partial_images=1)
    assert opened(partial["b64_json"]).size == opened(whole["b64_json"]).size == (64, 64)
    if kind in {"flux", "schnell"}:
        assert "true_cfg above 1" in refused(worker, negative_prompt="a dog")["message"]
        assert not is_same(first, drawn(worker, negative_prompt="a dog", true_cfg=4)[0])
    else:
        assert not is_same(first, drawn(worker, negative_prompt="a dog")[0])
    if kind == "schnell":
        assert "distilled" in refused(worker, guidance=3)["message"]
    if kind != "sdxl":
        assert "multiples of 16" in refused(worker, size="72x64")["message"]
    worker.process.kill()


def test_how_it_is_configured_counts(start, worker):
    """LoRA, scheduler, steps, tiles and slices."""
    lora = tiny_pictures.model("lora") / "pytorch_lora_weights.safetensors"
    ink, faint = (start("sd", lora=str(lora), lora_scale=scale) for scale in (1.0, 0.0))
    assert is_same(drawn(faint)[0], drawn(worker)[0])
    assert not is_same(drawn(ink)[0], drawn(worker)[0])
    plain = start("sd", scheduler="dpmpp_2m_karras", steps=4, vae_tiling=True, attention_slicing=True)
    (default,) = drawn(plain, steps=None)
    assert is_same(default, drawn(plain, steps=4)[0])
    assert is_same(drawn(plain, steps=None, quality="high")[0], drawn(plain, steps=6)[0])
    assert is_same(drawn(plain, steps=None, quality="low")[0], drawn(plain, steps=2)[0])
