"""What OpenAI's own Python client gets from a real pipeline: pictures as data, by address, and as they are made."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.support import environments, tiny_pictures
from tests.support.daemon import running
from tests.support.tiny_pictures import opened, png


@pytest.fixture(scope="module")
def sdk(tmp_path_factory):
    environments.installed("diffusers")
    painter = {"runtime": "diffusers", "path": str(tiny_pictures.model("sd3")), "threads": 1, "max_pixels": 1 << 16}
    config = {"models": {"painter": painter | {"steps": 4}}, "virtual_models": {"quick": {"model": "painter"}}}
    with (
        running(tmp_path_factory.mktemp("pictures"), config) as daemon,
        openai.OpenAI(
            base_url=f"{daemon.url}/v1",
            api_key="none is needed here",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client,
    ):
        yield client


class TestPictures:
    """Generations, edits and variations."""

    def test_generated(self, sdk):
        answer = sdk.images.generate(model="quick", prompt="a cat", size="96x64", n=2, extra_body={"seed": 7})
        assert [opened(picture.b64_json).size for picture in answer.data] == [(96, 64)] * 2
        assert (answer.size, answer.output_format, answer.background) == ("96x64", "png", "opaque")
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens

    def test_by_address(self, sdk):
        (picture,) = sdk.images.generate(model="quick", prompt="a cat", response_format="url").data
        assert opened(httpx.get(picture.url, trust_env=False).content).size == (64, 64)
        assert picture.b64_json is None

    def test_edited(self, sdk):
        mask = ("mask.png", png((64, 64), (0, 0, 0, 0)))
        (picture,) = sdk.images.edit(
            model="quick", image=("cat.png", png()), mask=mask, prompt="a hat", output_format="jpeg", quality="low"
        ).data
        assert opened(picture.b64_json).format == "JPEG"

    def test_edited_as_a_list(self, sdk):
        (picture,) = sdk.images.edit(model="quick", image=[("cat.png", png())], prompt="a hat").data
        assert opened(picture.b64_json).size == (64, 64)

    def test_varied(self, sdk):
        answer = sdk.images.create_variation(model="quick", image=("cat.png", png()), n=2)
        assert len({picture.b64_json for picture in answer.data}) == 2

    def test_streamed(self, sdk):
        events = list(sdk.images.generate(model="quick", prompt="a cat", stream=True, partial_images=2))
        assert [event.type for event in events] == [
            "image_generation.partial_image",
            "image_generation.partial_image",
            "image_generation.completed",
        ]
        assert [event.partial_image_index for event in events[:2]] == [0, 1]
        assert opened(events[-1].b64_json).size == (64, 64)
        assert events[-1].usage.output_tokens == 16

    def test_an_edit_streamed(self, sdk):
        events = list(sdk.images.edit(model="quick", image=("cat.png", png()), prompt="a hat", stream=True))
        assert [event.type for event in events] == ["image_edit.completed"]

    def test_what_the_model_cannot_do(self, sdk):
        with pytest.raises(openai.BadRequestError, match="opaque") as told:
            sdk.images.generate(model="quick", prompt="a cat", background="transparent")
        assert (told.value.param, told.value.code) == ("background", "unsupported_parameter")
