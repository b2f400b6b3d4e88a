"""The playground's pictures by a real pipeline: how far they are is seen while they are made."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.support import environments, tiny_pictures
from tests.support.daemon import running, wait_until


@pytest.fixture(scope="module")
def painting(tmp_path_factory):
    environments.installed("diffusers")
    painter = {"runtime": "diffusers", "path": str(tiny_pictures.model()), "threads": 1, "steps": 200}
    with running(tmp_path_factory.mktemp("painting"), {"models": {"painter": painter}}) as daemon:
        yield daemon


def test_steps_are_shown_until_the_picture_is(painting, open_page):
    page = open_page(painting, "playground/images")
    page.get_by_label("Size").select_option("auto")
    page.get_by_label("Number").fill("4")
    page.get_by_role("button", name="Make").click()
    expect(page.get_by_role("status").filter(has_text="Step")).to_have_text(
        re.compile(r"Step \d+ of 800"), timeout=60_000
    )
    page.get_by_role("button", name="Stop").click()
    wait_until(lambda: painting.model("painter")["in_flight"] == 0, what="the model is free")
    page.get_by_label("Number").fill("1")
    page.get_by_role("button", name="Make").click()
    pictures = page.locator(".pictures img")
    expect(pictures).to_have_count(1, timeout=60_000)
    assert pictures.first.evaluate("picture => picture.naturalWidth") == 64
