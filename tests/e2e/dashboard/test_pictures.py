"""The playground's pictures by a real pipeline: how far they are, and what there is of them, is seen while they are made."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.support import environments, tiny_pictures
from tests.support.daemon import running, wait_until


@pytest.fixture(scope="module")
def painting(tmp_path_factory):
    environments.installed("diffusers")
    painter = {"runtime": "diffusers", "path": str(tiny_pictures.model()), "threads": 1, "steps": 40}
    with running(tmp_path_factory.mktemp("painting"), {"models": {"painter": painter}}) as daemon:
        yield daemon


def test_what_there_is_so_far_is_shown_until_the_picture_is(painting, open_page):
    page = open_page(painting, "playground/images")
    page.get_by_label("Size").select_option("auto")
    page.get_by_label("Number").fill("4")
    page.get_by_role("button", name="Make").click()
    expect(page.get_by_role("status").filter(has_text="Step")).to_have_text(
        re.compile(r"Step \d+ of 160"), timeout=60_000
    )
    partial = page.get_by_alt_text("What there is so far")
    expect(partial).to_have_count(1, timeout=60_000)
    assert partial.evaluate("picture => picture.decode().then(() => picture.naturalWidth)") == 64
    page.get_by_role("button", name="Stop").click()
    expect(partial).to_have_count(0)
    wait_until(lambda: painting.model("painter")["in_flight"] == 0, what="the model is free")
    page.get_by_label("Number").fill("1")
    page.get_by_role("button", name="Make").click()
    pictures = page.locator(".pictures img:not(.partial)")
    expect(pictures).to_have_count(1, timeout=60_000)
    assert pictures.evaluate("picture => picture.naturalWidth") == 64
