"""ComfyUI behind OpenAI's images API: a worker of ours, and below it a server that follows ComfyUI's own (fake_comfyui.py).

LLMUX_TEST_COMFYUI, if set, is the folder of a real checkout with an environment; its own tests run then.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from runtimes import device_kind
from runtimes.base import LaunchContext
from runtimes.device_kind import DeviceAssignment
from runtimes.registry import REGISTRY
from runtimes.shared.pictures import HEADER
from tests.contract.conftest import BASE_ENVIRONMENT
from tests.support import environments, fake_comfyui
from tests.support.daemon import wait_until
from tests.support.limits import LIMIT_S
from tests.support.ports import quiet_ports

ADAPTER = REGISTRY.get("comfyui")
GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"


@dataclass
class Painter:
    """A worker, and how to ask it."""

    process: subprocess.Popen[bytes]
    http: httpx.Client
    log: Path

    def draw(self, prompt: str = "a cat", **fields: object) -> httpx.Response:
        return self.http.post(GENERATIONS, json={"prompt": prompt, **fields}, headers={"x-request-id": "mine"})

    def stream(self, **fields: object) -> list[dict]:
        answer = self.draw(stream=True, **fields)
        assert answer.status_code == 200, answer.text
        lines = answer.text.splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]

    def prompts(self) -> list[dict]:
        lines = self.log.read_text().splitlines()
        return [json.loads(line.removeprefix("prompt: ")) for line in lines if line.startswith("prompt: ")]

    def painted(self) -> dict[str, object]:
        """What the painter was told last."""
        return self.prompts()[-1]["1"]["inputs"]

    def folder(self) -> Path:
        words = next(line for line in self.log.read_text().splitlines() if line.startswith("argv: "))
        argv = json.loads(words.removeprefix("argv: "))
        return Path(argv[argv.index("--output-directory") + 1]).parent

    def healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/health").status_code == 200
        return False


def pictures(answer: httpx.Response) -> list[bytes]:
    assert answer.status_code == 200, answer.text
    return [base64.b64decode(each["b64_json"]) for each in answer.json()["data"]]


def size(picture: bytes) -> tuple[int, ...]:
    assert picture.startswith(b"\x89PNG")
    return struct.unpack(">2I", picture[16:24])


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("comfyui")
    python = environments.installed("comfyui") / "comfyui" / "bin" / "python"
    return {
        "runtime": "comfyui",
        "folder": str(fake_comfyui.checkout(folder)),
        "python": str(python),
        "workflow": str(folder / "flow.json"),
        "inputs": fake_comfyui.INPUTS,
    }


@contextlib.contextmanager
def started(folder: Path, keys: dict[str, object]) -> Iterator[Painter]:
    where = LaunchContext(
        "the-model",
        "127.0.0.1",
        quiet_ports(),
        secrets.token_hex(16),
        (DeviceAssignment("host", device_kind.HOST),),
        environments.FOLDER,
    )
    spec = ADAPTER.launch(ADAPTER.config(**keys), where)
    log = folder / "worker.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            spec.argv, env={**BASE_ENVIRONMENT, **spec.env}, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    http = httpx.Client(
        base_url=f"http://127.0.0.1:{spec.port}",
        headers={"Authorization": spec.auth or ""},
        timeout=LIMIT_S,
        trust_env=False,
    )
    try:
        with http:
            painter = Painter(process, http, log)
            wait_until(painter.healthy, what="the worker is healthy")
            yield painter
    finally:
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(process.pid).children()
        for each in [process, *below]:
            with contextlib.suppress(psutil.Error):
                each.kill()
        process.wait()


@pytest.fixture(scope="module")
def painter(keys, tmp_path_factory) -> Iterator[Painter]:
    with started(tmp_path_factory.mktemp("painter"), keys) as worker:
        yield worker


@pytest.fixture
def begin(tmp_path, keys) -> Iterator[Callable[..., Painter]]:
    with contextlib.ExitStack() as stack:
        yield lambda **changed: stack.enter_context(started(tmp_path, {**keys, **changed}))


class TestGenerations:
    """A request's values in their places in the workflow."""

    def test_a_picture(self, painter):
        answer = painter.draw(seed=7, size="96x80", steps=3, guidance=2.5)
        (picture,) = pictures(answer)
        assert size(picture) == (96, 80)
        assert answer.json()["data"][0]["seed"] == 7
        told = painter.painted()
        assert (told["text"], told["seed"], told["steps"], told["cfg"]) == ("a cat", 7, 3, 2.5)

    def test_what_is_not_said_is_as_in_the_workflow(self, painter):
        assert size(pictures(painter.draw())[0]) == (64, 48)
        assert (painter.painted()["steps"], painter.painted()["ckpt_name"]) == (4, "one.safetensors")

    def test_the_same_seed_gives_the_same_picture_again(self, painter):
        assert pictures(painter.draw(seed=9)) == pictures(painter.draw(seed=9))

    def test_without_a_seed_each_is_another(self, painter):
        seeds = {painter.draw(seed=seed).json()["data"][0]["seed"] for seed in (-1, None, -1)}
        assert len(seeds) == 3

    def test_several_without_a_place_for_n_come_one_after_the_other(self, painter):
        before = len(painter.prompts())
        answer = painter.draw(seed=20, n=3)
        assert [each["seed"] for each in answer.json()["data"]] == [20, 21, 22]
        assert len(painter.prompts()) - before == 3

    def test_several_at_once_where_there_is_one(self, begin):
        painter = begin(inputs={**fake_comfyui.INPUTS, "n": "1.batch_size"})
        assert len(pictures(painter.draw(n=3))) == 3
        assert len(painter.prompts()) == 1

    def test_other_formats_are_comfyuis_own(self, painter):
        (made,) = pictures(painter.draw(output_format="jpeg", output_compression=50))
        assert made.startswith(b"jpeg;50 of ")

    def test_a_checkpoint_by_name(self, painter):
        assert painter.draw(checkpoint="two.safetensors").status_code == 200
        assert painter.painted()["ckpt_name"] == "two.safetensors"
        answer = painter.draw(checkpoint="../etc/passwd")
        assert answer.status_code == 400
        assert "'../etc/passwd' not in ['one.safetensors', 'two.safetensors']" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"negative_prompt": "dogs"}, "negative_prompt"),
            ({"strength": 0.5}, "strength"),
            ({"size": "big"}, "size"),
            ({"size": "4096x4096"}, "size"),
            ({"size": "640000x64"}, "size"),
            ({"image": "data:"}, "image"),
            ({"mask": "data:"}, "mask"),
            ({"steps": 0}, "steps"),
            ({"n": 11}, "n"),
            ({"seed": 1 << 40}, "seed"),
            ({"response_format": "url", "stream": True}, "response_format"),
            ({"response_format": "html"}, "response_format"),
            ({"partial_images": 1}, "partial_images"),
            ({"partial_images": 4, "stream": True}, "partial_images"),
            ({"background": "transparent"}, "background"),
            ({"output_format": "gif"}, "output_format"),
            ({"prompt": " "}, "prompt"),
        ],
        ids=str,
    )
    def test_refused(self, painter, fields, param):
        answer = painter.draw(**fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    def test_a_stream_has_each_picture_once_it_is_made(self, painter):
        told = painter.stream(seed=4, n=2)
        assert [(each["type"], each["seed"]) for each in told] == [
            ("image_generation.completed", seed) for seed in (4, 5)
        ]

    def test_a_stream_has_a_comment_for_each_step(self, painter):
        text = painter.draw(stream=True, steps=3, n=2).text
        comments = [line for line in text.splitlines() if line.startswith(": ")]
        assert comments == [f": step {step} of 6" for step in range(1, 7)]

    def test_a_stream_has_what_the_sampler_shows_at_even_steps(self, painter):
        told = painter.stream(steps=9, n=2, partial_images=2, output_format="webp")
        kinds = [each["type"].removeprefix("image_generation.") for each in told]
        assert kinds == ["partial_image", "partial_image", "completed"] * 2
        assert [each["partial_image_index"] for each in told[:2]] == [0, 1]
        assert [base64.b64decode(each["b64_json"]) for each in told[:2]] == [
            fake_comfyui.preview(3),
            fake_comfyui.preview(6),
        ]
        assert [each["output_format"] for each in told[:3]] == ["jpeg", "jpeg", "webp"]

    @pytest.mark.parametrize("steps", [1, 2])
    def test_few_steps_have_fewer(self, painter, steps):
        assert len(painter.stream(steps=steps, partial_images=3)) == steps

    def test_who_wants_no_previews_has_none(self, begin):
        painter = begin(extra_args=["--preview-method", "none"])
        (told,) = painter.stream(partial_images=3)
        assert told["type"] == "image_generation.completed"

    def test_who_wants_addresses_says_so_to_the_supervisor(self, painter):
        assert painter.draw(response_format="url").headers[HEADER] == "url"
        assert HEADER not in painter.draw(response_format="b64_json").headers

    def test_nothing_is_left_on_disk(self, painter):
        painter.draw()
        assert [path for path in painter.folder().rglob("*") if path.is_file()] == []


class TestEdits:
    """A workflow that loads a picture changes the client's."""

    def test_changed(self, begin, keys):
        flow = str(Path(str(keys["workflow"])).with_name("changing.json"))
        painter = begin(workflow=flow, inputs={**fake_comfyui.INPUTS, "image": "3.image"})
        files = {"image": ("cat.png", b"a picture")}
        answer = painter.http.post(EDITS, data={"prompt": "a hat", "seed": "3"}, files=files)
        assert len(pictures(answer)) == 1
        name = painter.prompts()[-1]["3"]["inputs"]["image"]
        assert name.startswith("image-")
        assert painter.painted()["text"] == "a hat"
        answer = painter.http.post(EDITS, data={"prompt": "a hat"}, files={"image": ("cat.png", b"")})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "image")
        assert "image can't be loaded: LoadImage: cannot identify image file." in answer.text

    def test_without_a_picture(self, painter):
        answer = painter.http.post(EDITS, files={"prompt": (None, "a hat")})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_file")

    def test_without_a_place_for_it(self, painter):
        answer = painter.http.post(EDITS, data={"prompt": "a hat"}, files={"image": ("cat.png", b"a picture")})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "image")


class TestTrouble:
    """What goes wrong below is told, or ends the worker."""

    def test_a_node_that_fails(self, painter):
        answer = painter.draw("!error")
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "ComfyUI failed: Painter: the brush broke."
        assert painter.draw().status_code == 200

    def test_a_connection_that_breaks(self, painter):
        answer = painter.draw("!close")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "worker_failed")

    def test_its_death_is_the_workers(self, begin):
        painter = begin()
        with contextlib.suppress(httpx.TransportError):
            assert painter.draw("!die").status_code == 500
        assert painter.process.wait(LIMIT_S) != 0

    def test_a_client_that_leaves_interrupts_its_own_picture(self, painter):
        with pytest.raises(httpx.ReadTimeout):
            painter.http.post(GENERATIONS, json={"prompt": "!hang"}, timeout=httpx.Timeout(LIMIT_S, read=1.0))
        wait_until(lambda: "interrupted: " in painter.log.read_text(), what="it is interrupted")
        assert painter.draw().status_code == 200

    def test_a_client_that_leaves_a_stream_interrupts_it(self, painter):
        before = painter.log.read_text().count("interrupted: ")
        wanted = {"prompt": "!hang", "stream": True, "partial_images": 1}
        with painter.http.stream("POST", GENERATIONS, json=wanted) as answer:
            assert any("partial_image" in line for line in answer.iter_lines())
        wait_until(lambda: painter.log.read_text().count("interrupted: ") > before, what="it is interrupted")
        assert painter.draw().status_code == 200

    def test_progress_while_it_draws(self, painter):
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(painter.draw("!hang")))
        asking.start()
        told = {"requests": {"mine": {"step": 4, "steps": 4}}}
        wait_until(lambda: painter.http.get("/progress").json() == told, what="all steps are told")
        (child,) = psutil.Process(painter.process.pid).children()
        (port,) = {each.laddr.port for each in child.net_connections() if each.status == psutil.CONN_LISTEN}
        httpx.post(f"http://127.0.0.1:{port}/interrupt", json={}, trust_env=False)  # as ComfyUI's own page can
        asking.join(LIMIT_S)
        assert answers[0].json()["error"]["message"] == "ComfyUI failed: somebody has interrupted it."
        assert painter.http.get("/progress").json() == {"requests": {}}

    def test_it_ends_with_the_worker(self, begin):
        painter = begin()
        (child,) = psutil.Process(painter.process.pid).children()
        folder = painter.folder()
        painter.process.terminate()
        assert painter.process.wait(LIMIT_S) == 0
        assert not child.is_running()
        assert not folder.exists()

    def test_what_a_killed_worker_left_is_deleted_by_the_next(self, begin):
        killed = begin()
        folder = killed.folder()
        (folder / "input" / "portrait").touch()
        (child,) = psutil.Process(killed.process.pid).children()
        for each in (killed.process, child):  # in the daemon its shim sees to the second
            each.kill()
            each.wait()
        assert folder.exists()
        assert begin().folder() != folder
        assert not folder.exists()

    def test_a_workflow_with_nodes_that_it_lacks(self, keys, tmp_path):
        flow = {**fake_comfyui.FLOW, "9": {"class_type": "FancyNode", "inputs": {}}}
        (tmp_path / "flow.json").write_text(json.dumps(flow))
        changed = {**keys, "workflow": str(tmp_path / "flow.json")}
        clue = "ComfyUI has no node FancyNode: install what the workflow needs"
        with pytest.raises(AssertionError, match=clue), started(tmp_path, changed):
            pass


REAL = pytest.mark.skipif(
    "LLMUX_TEST_COMFYUI" not in os.environ, reason="LLMUX_TEST_COMFYUI names no checkout of ComfyUI"
)
SAMPLER = """
import comfy.latent_formats, comfy.utils, latent_preview, torch

class Sampler:
    CATEGORY, FUNCTION, RETURN_TYPES = "tests", "draw", ("IMAGE",)
    INPUT_TYPES = classmethod(lambda cls: {"required": {"image": ("IMAGE",), "text": ("STRING",), "steps": ("INT",)}})

    def draw(self, image, text, steps):
        previewer = latent_preview.get_previewer("cpu", comfy.latent_formats.SD15())
        shown = previewer and previewer.decode_latent_to_preview_image("JPEG", torch.zeros(1, 4, 6, 8))
        bar = comfy.utils.ProgressBar(steps)
        for step in range(steps):
            bar.update_absolute(step + 1, steps, shown)
        return (image,)

NODE_CLASS_MAPPINGS = {"Sampler": Sampler}
"""


@contextlib.contextmanager
def really(folder: Path, flow: dict[str, object], places: dict[str, str], **keys: object) -> Iterator[Painter]:
    """The real server, with nodes that need no model."""
    (folder / "flow.json").write_text(json.dumps(flow))
    environments.installed("comfyui")
    about = {"folder": os.environ["LLMUX_TEST_COMFYUI"], "workflow": str(folder / "flow.json"), "inputs": places}
    with started(folder, {"runtime": "comfyui", **about, **keys}) as painter:
        yield painter


@REAL
def test_the_real_server(tmp_path):
    """A plain picture, saved."""
    flow = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 48, "batch_size": 1, "color": 255}},
        "2": {"class_type": "SaveImage", "inputs": {"filename_prefix": "made", "images": ["1", 0]}},
    }
    places = {
        "prompt": "2.filename_prefix",
        "width": "1.width",
        "height": "1.height",
        "n": "1.batch_size",
        "seed": "1.color",
    }
    with really(tmp_path, flow, places) as painter:
        for _ in range(2):  # the second time all of it is in ComfyUI's cache
            made = pictures(painter.draw(size="96x80", n=2, seed=65_280))
            assert [size(picture) for picture in made] == [(96, 80)] * 2


@REAL
def test_the_real_servers_previews(tmp_path):
    """As its samplers tell them, by a node that samples nothing."""
    (tmp_path / "custom_nodes").mkdir()
    (tmp_path / "custom_nodes" / "sampler.py").write_text(SAMPLER)
    flow = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 48, "batch_size": 1, "color": 255}},
        "2": {"class_type": "Sampler", "inputs": {"image": ["1", 0], "text": "x", "steps": 4}},
        "3": {"class_type": "SaveImage", "inputs": {"filename_prefix": "made", "images": ["2", 0]}},
    }
    with really(tmp_path, flow, {"prompt": "2.text", "steps": "2.steps"}, base_directory=str(tmp_path)) as painter:
        partial, whole = painter.stream(steps=6, partial_images=1)
    assert (partial["output_format"], whole["output_format"]) == ("jpeg", "png")
    assert base64.b64decode(partial["b64_json"]).startswith(b"\xff\xd8\xff")
    assert size(base64.b64decode(whole["b64_json"])) == (64, 48)
