"""What not every configuration has: tasks, replicas, long loads, sets, kept bodies; and what each key used."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.e2e.dashboard.conftest import emptied, row, wait_fit
from tests.support.daemon import fake, running

SLOW = ["--start-delay", "120", "--log-text", "Loading shards:  40%|####      | 2/5"]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    config = {
        "models": {
            "first": fake(keep_bodies=True),
            "second": fake(),
            "cloud": {"runtime": "openai_remote", "base_url": "http://127.0.0.1:9/v1", "upstream_model": "large"},
            "embedder": fake(type="embedding"),
            "pair": fake("--take-mib", "20", replicas=2),
            "slow": fake(*SLOW),
        },
        "tasks": {"titles": {"candidates": ["first", "second", "cloud"]}},
        "sets": {
            "coding": {"description": "In the evening", "pin": ["first"]},
            "documents": {"default_model": "embedder"},
        },
    }
    with running(tmp_path_factory.mktemp("extras"), config) as daemon:
        yield daemon


@pytest.fixture
def extras(started):
    return emptied(started)


class TestTasks:
    """Whom a task's request would go to, and the guard against cloud fallbacks."""

    def test_follow_the_models_and_the_guard(self, extras, open_page):
        page = open_page(extras)
        task = page.locator(".tasks-table tbody tr", has_text="titles")
        expect(task.locator("li", has_text="next")).to_contain_text("first")
        extras.post("/v1/admin/models/second/load").raise_for_status()
        expect(task.locator("li", has_text="next")).to_contain_text("second")
        expect(task).to_contain_text("second is ready, and first, which would come first, is not.")
        guard = page.get_by_label("Remote models may answer")
        expect(guard).to_be_checked()
        guard.uncheck()
        expect(task.locator("li.muted")).to_contain_text("cloud")
        assert extras.get("/api/v1/config").json() == {"allowCloudFallback": False}
        guard.check()
        expect(task.locator("li.muted")).to_have_count(0)


class TestLoads:
    """What is being loaded, how far it is, and what came of the last ones; replicas are told in one row, in the memory and in
    the decisions.
    """

    def test_are_followed_and_cancelled_and_replicas_are_one_model(self, extras, open_page):
        page = open_page(extras)
        row(page, "pair").get_by_role("button", name="Load").click()
        expect(row(page, "pair")).to_contain_text("ready ×2")
        expect(page.locator("tr[data-model]")).to_have_count(len(extras.config["models"]))
        page.locator(".legend a", has_text="pair#2").click()
        dialog = page.get_by_role("dialog", name="pair")
        expect(dialog.locator(".decisions")).to_contain_text("pair#2")
        dialog.get_by_role("link", name="About").click()
        expect(dialog.locator(".facts")).to_contain_text(re.compile(r"pair#2:\d+: ready on host"))
        page.keyboard.press("Escape")

        loads = page.locator(".jobs-table tbody tr")
        expect(loads.filter(has_text="pair").first).to_contain_text("completed")
        row(page, "slow").get_by_role("button", name="Load").click()
        slow_load = loads.filter(has_text="slow")
        expect(slow_load).to_contain_text("40 %")
        expect(slow_load).to_contain_text("Loading shards")
        slow_load.get_by_role("button", name="Cancel load slow").click()
        expect(slow_load).to_contain_text("cancelled by an operator")
        expect(slow_load.get_by_role("button")).to_have_count(0)
        expect(row(page, "slow")).to_contain_text("stopped")

        row(page, "pair").get_by_role("button", name="Unload").click()
        expect(row(page, "pair")).to_contain_text("stopped")
        expect(page.locator(".segment")).to_have_count(0)


class TestSets:
    """One switch above the models."""

    def test_is_switched_by_keyboard_and_by_others(self, extras, open_page):
        page = open_page(extras, width=390, theme="dark")
        choice = page.get_by_role("group", name="Set")
        expect(choice.get_by_role("radio", name="As configured")).to_be_checked()
        choice.get_by_role("radio", name="As configured").focus()
        page.keyboard.press("ArrowDown")
        expect(choice).to_contain_text("In the evening; pinned: first")
        expect(row(page, "first").get_by_label("Pin first")).to_have_attribute("aria-pressed", "true")
        with extras.client() as client:
            for name, label in [("documents", "documents"), (None, "As configured")]:
                assert client.put("/v1/admin/sets", json={"active": name}).status_code == 200
                expect(choice.get_by_role("radio", name=label)).to_be_checked()
        wait_fit(page, 390, 1280)


class TestUsage:
    """What each key used, as a table and as a file; and what was kept of a request."""

    def test_by_key_and_model_and_as_csv(self, extras, open_page):
        before = sum(row["requests"] for row in extras.get("/v1/admin/usage").json()["data"])
        for model in ("first", "second", "second"):
            extras.chat(model, text="What is kept?")
        page = open_page(extras, "usage", width=390)
        rows = page.locator(".usage-table tbody tr")
        expect(rows).to_have_count(2)  # the total, and the one key
        expect(rows.nth(1)).to_contain_text("(no key)")
        expect(rows.nth(1).locator("td").nth(1)).to_have_text(str(before + 3))
        page.get_by_label("By model").check()
        expect(rows).to_have_count(3)
        asked = re.compile(r"/v1/admin/usage\?.*by_model=false")
        page.route(asked, lambda _: None)  # not answered before the next question, which takes it back
        page.get_by_label("By model").uncheck()
        with page.expect_event("requestfailed", lambda request: asked.search(request.url)):
            page.get_by_label("By model").check()
        expect(rows).to_have_count(3)
        wait_fit(page, 390, 1280)
        with page.expect_download() as download:
            page.get_by_role("button", name="Download as CSV").click()
        lines = download.value.path().read_text().splitlines()
        assert lines[0].startswith("day,key,key_id,requests")
        assert len(lines) == 3
        page.get_by_role("link", name="Requests", exact=True).click()
        page.get_by_role("link", name="first", exact=True).click()
        expect(page.get_by_label("body", exact=True)).to_contain_text("What is kept?")


class TestJobs:
    """Jobs of all kinds. The last class here: it fills the lists that the others read."""

    def test_one_that_is_under_way_is_shown_however_many_came_later(self, extras, open_page):
        body = {"messages": [{"role": "user", "content": "Hello"}]}
        extras.post("/v1/admin/models/first/load").raise_for_status()
        with extras.client() as client:

            def submit(model: str) -> str:
                asked = {"endpoint": "/v1/chat/completions", "body": {"model": model, **body}}
                return client.post("/v1/jobs", json=asked).raise_for_status().json()["id"]

            old, *later = submit("slow"), *(submit("first") for _ in range(201))
            page = open_page(extras)
            jobs = page.locator(".jobs-table tbody tr")
            expect(jobs.filter(has=page.locator(f"td[title={old}]"))).to_contain_text("running")
            expect(jobs.filter(has_text="completed")).to_have_count(5)
            for job_id in (old, *later):
                client.delete(f"/v1/jobs/{job_id}").raise_for_status()
