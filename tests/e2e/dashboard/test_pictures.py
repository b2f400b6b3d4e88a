"""The playground's pictures by a real pipeline: how far they are, and what there is of them, is seen while they are made."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Route, expect

from tests.support import environments, tiny_pictures
from tests.support.daemon import running, wait_until


@pytest.fixture(scope="module")
def painting(tmp_path_factory):
    environments.installed("diffusers")
    painter = {"runtime": "diffusers", "path": str(tiny_pictures.model()), "threads": 1, "steps": 200}
    with running(tmp_path_factory.mktemp("painting"), {"models": {"painter": painter}}) as daemon:
        yield daemon


def test_what_there_is_so_far_is_shown_until_the_picture_is(painting, open_page):
    page = open_page(painting, "playground/images")
    page.get_by_label("Size").select_option("auto")
    page.get_by_label("Number").fill("4")
    page.get_by_role("button", name="Make").click()
    expect(page.get_by_role("status").filter(has_text="Step")).to_have_text(
        re.compile(r"Step \d+ of 800"), timeout=60_000
    )
    partial = page.get_by_alt_text("What there is so far")
    expect(partial).to_have_count(1, timeout=60_000)
    assert partial.evaluate("picture => picture.decode().then(() => picture.naturalWidth)") == 64
    page.get_by_role("button", name="Stop").click()
    expect(partial).to_have_count(0)
    wait_until(lambda: painting.model("painter")["in_flight"] == 0, what="the model is free")
    page.get_by_label("Number").fill("1")
    page.get_by_role("button", name="Make").click()
    pictures = page.locator(".pictures img")
    expect(pictures).to_have_count(1, timeout=60_000)
    assert pictures.first.evaluate("picture => picture.naturalWidth") == 64


@pytest.mark.parametrize("is_cold", [False, True], ids=["at once", "after a wait"])
def test_a_model_that_has_no_streams_is_asked_again_without(painting, open_page, is_cold):
    """What is refused while it loads comes in the stream that has begun."""
    page = open_page(painting, "playground/images")

    def refuse(route: Route) -> None:
        if not route.request.post_data_json.get("stream"):
            route.continue_()
            return
        error = json.dumps(
            {"error": {"message": "No streams.", "type": "invalid_request_error", "code": "unsupported"}}
        )
        if is_cold:
            route.fulfill(content_type="text/event-stream", body=f": waiting\n\ndata: {error}\n\n")
        else:
            route.fulfill(status=400, content_type="application/json", body=error)

    page.route("**/v1/images/generations", refuse)
    page.get_by_label("Size").select_option("auto")
    page.get_by_role("button", name="Make").click()
    expect(page.locator(".pictures img")).to_have_count(1, timeout=60_000)
    expect(page.get_by_text("No streams.")).to_have_count(0)
