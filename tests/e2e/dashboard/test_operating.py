"""What an operator does with the dashboard on a busy day: requests, logs, memory, many models, reloads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from supervisor.api.models import RESTARTED
from tests.e2e.dashboard.conftest import KEY, row, segment, violations, visit
from tests.support.daemon import Daemon, fake, gguf, running, wait_until


def ended(page: Page) -> list[str]:
    return page.locator(".ended-table tbody a").all_inner_texts()


class TestRequests:
    """The last thousand, as the daemon keeps them: also those from before the page was opened; and who asked."""

    def test_are_found_and_tell_their_wait_in_parts(self, empty, open_page):
        empty.chat("qwen-small")
        empty.chat("tiny-chat")
        empty.chat("never-heard-of")
        page = open_page(empty, "requests")
        page.locator(".ended-table").wait_for()
        assert ended(page)[:3] == ["never-heard-of", "tiny-chat", "qwen-small"]
        page.locator(".ended-table tbody tr").nth(2).click()
        request = page.get_by_role("dialog", name="Request")
        phases = request.get_by_role("list", name="Where its time went")
        expect(phases).to_contain_text("Waited for the model to load.")
        expect(phases).to_contain_text("The worker answered.")
        expect(request.locator(".decisions")).to_contain_text("qwen-small")
        request.locator(".facts").get_by_role("link", name="qwen-small").click()
        model = page.get_by_role("dialog", name="qwen-small")
        expect(model).to_be_visible()
        page.keyboard.press("Escape")
        expect(model).to_have_count(0)  # it has links to its own pages
        expect(page.locator("nav [aria-current=page]")).to_have_text("Requests")

        page.get_by_label("Failed only").check()
        expect(page.locator(".ended-table")).not_to_contain_text("tiny-chat")
        expect(page.locator(".ended-table tbody tr").first).to_contain_text("404 model_not_found")
        page.get_by_label("Failed only").uncheck()
        page.get_by_label("Text").fill("never-heard")
        wait_until(lambda: set(ended(page)) == {"never-heard-of"})
        page.get_by_label("Text").fill("")
        page.get_by_role("combobox", name="Model").select_option("qwen-small")
        wait_until(lambda: set(ended(page)) == {"qwen-small"})
        before = len(ended(page))
        said = {"x-tenant-id": "amy", "x-priority": "high"}
        body = {"model": "qwen-small", "messages": []}
        assert empty.post("/v1/chat/completions", json=body, headers=said).status_code == 200
        wait_until(lambda: len(ended(page)) > before)  # as it happens

        expect(page.locator(".ended-table tbody tr").first).to_contain_text("amy · priority 20")
        amy = page.locator(".clients-table tbody tr", has_text="amy")
        amy.get_by_role("button", name="Pause amy").click()
        expect(amy).to_contain_text("pauses")
        assert empty.post("/v1/chat/completions", json=body, headers=said).status_code == 429
        amy.get_by_role("button", name="Resume amy").click()
        expect(amy).not_to_contain_text("pauses")
        assert empty.post("/v1/chat/completions", json=body, headers=said).status_code == 200

    def test_one_is_copied_without_its_key(self, locked, open_page):
        page = open_page(locked)
        page.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        body = {"model": "it's", "messages": []}
        locked.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"})
        page.get_by_role("link", name="Requests", exact=True).click()
        page.locator(".ended-table").get_by_role("link", name="it's").first.click()
        page.get_by_role("button", name="Copy request as curl").click()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert KEY not in copied
        assert "Bearer $LLMUX_API_KEY" in copied
        assert f"curl '{locked.url}/v1/chat/completions'" in copied
        assert """-d '{"model":"it'\\''s","messages":[{"role":"user","content":"Hello"}]}'""" in copied


class TestMany:
    """Requests that are alike are one line to cancel; an unload says first for whom it matters."""

    def test_are_cancelled_cut_off_and_waited_for(self, empty, clients, open_page):
        clients.begin("slow", 5)
        page = open_page(empty)
        line = page.get_by_role("list", name="In flight and queued").get_by_role("listitem")
        expect(line).to_have_count(1)
        expect(line).to_contain_text(re.compile(r"5 (running|queued) for slow"))
        line.get_by_role("button", name=re.compile("running|queued")).first.click()
        expect(line).to_have_count(6)
        page.get_by_role("button", name="Cancel all 5").click()
        page.get_by_role("dialog", name="Cancel 5 requests").get_by_role("button", name="Cancel all 5").click()
        expect(line).to_have_count(0)
        ends = clients.join()
        assert len(ends) == 5
        assert all("cancelled by an operator" in end or end.startswith("cut") for end in ends)

        clients.begin("single", 3)
        unload = row(page, "single").get_by_role("button", name="Unload")
        question = page.get_by_role("dialog", name="Unload single")
        expect(row(page, "single")).to_contain_text("2 queued")
        unload.click()
        for text in [
            "1 request running on it",
            "2 requests waiting for it",
            "The next request for single loads it again",
        ]:
            expect(question).to_contain_text(text)
        page.keyboard.press("Escape")
        expect(question).to_have_count(0)
        assert empty.model("single")["in_flight"] == 1
        unload.click()
        question.get_by_role("button", name="Cut it off now").click()
        expect(row(page, "single")).to_contain_text("stopped")
        assert sum("model_unloaded" in end for end in clients.join()) >= 2

        clients.begin("single", 2)
        before = wait_until(lambda: (view := empty.model("single"))["queued"] == 1 and view["generation"])
        expect(row(page, "single")).to_contain_text("1 queued")
        unload.click()
        expect(question).to_contain_text("get up to 1.0 s more; what is left then is cut off")
        expect(question).to_contain_text("The waiting ones stay, and load it again right after.")
        question.get_by_role("button", name="Unload when done").click()
        wait_until(lambda: (view := empty.model("single"))["generation"] > before and view["in_flight"] == 1)


class TestLog:
    """A model's log is followed, searched, wrapped and taken along."""

    def test_is_followed_searched_wrapped_and_downloaded(self, empty, open_page):
        empty.post("/v1/admin/models/kokoro/load")
        page = open_page(empty, "models/kokoro/log")
        log = page.get_by_role("log")
        expect(log).to_contain_text("kokoro speaks")
        for _ in range(3):
            empty.post("/v1/audio/speech", json={"model": "kokoro", "input": "Hello", "voice": "any"})
        expect(log).to_contain_text("POST /v1/audio/speech")
        page.get_by_label("Search the log").fill("/V1/AUDIO")
        expect(log.locator("mark").first).to_have_text("/v1/audio")
        page.get_by_label("Only these").check()
        expect(log).not_to_contain_text("kokoro speaks")
        page.keyboard.press("Tab")
        page.get_by_label("Search the log").press("Enter")
        expect(log.locator("mark.here")).to_have_count(1)
        page.get_by_label("Search the log").fill("")
        expect(log).to_contain_text("kokoro speaks")
        style = "element => getComputedStyle(element).whiteSpace"
        assert log.evaluate(style) == "pre-wrap"
        page.get_by_label("Wrap").uncheck()
        wait_until(lambda: log.evaluate(style) == "pre")
        with page.expect_download() as saved:
            page.get_by_role("button", name="Download").click()
        assert saved.value.suggested_filename == "kokoro.log"
        assert "kokoro speaks" in saved.value.path().read_text()
        with next(empty.state_dir.rglob("kokoro.log")).open("a") as written:
            written.writelines(f"line {number}\n" for number in range(6000))
        expect(log).to_contain_text("line 5999")
        shown = log.text_content().splitlines()
        assert len(shown) == 5000
        assert shown[0].startswith("[older lines are not shown")

    def test_goes_on_after_the_daemon_restarted(self, locked, open_page):
        def loaded() -> str:
            view = locked.post("/v1/admin/models/plain/load", headers={"authorization": f"Bearer {KEY}"}).json()
            return f"fake worker {view['worker']['pid']} starting"

        first = loaded()
        page = open_page(locked, "models/plain/log")
        page.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        log, search = page.get_by_role("log"), page.get_by_label("Search the log")
        expect(log).to_contain_text(first)
        search.fill("WORKER")
        page.get_by_label("Wrap").uncheck()
        locked.stop()
        expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("Trying again")
        locked.start()
        second = loaded()
        expect(log).to_contain_text(second)
        expect(page.get_by_role("dialog").get_by_role("alert")).to_have_count(0)
        written = [path.read_text() for path in sorted((locked.state_dir).rglob("plain.log*"), reverse=True)]
        assert first in written[0]
        assert second in written[1]
        wait_until(lambda: len(log.inner_text().splitlines()) == len("".join(written).splitlines()) + 1)
        lines = log.inner_text().splitlines()
        assert [line for line in lines if line != RESTARTED] == "".join(written).splitlines()
        assert lines.index(first) < lines.index(RESTARTED) < lines.index(second)
        expect(search).to_have_value("WORKER")
        expect(log.locator("mark").first).to_have_text("worker")
        expect(page.get_by_label("Wrap")).not_to_be_checked()


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Daemon]:
    """A hundred models of several types, the first twelve of them loaded. The memory of two can't be right."""
    types = ["llm", "llm", "tts", "asr", "embedding"]
    models = {f"model-{n}": fake(vram_mib=60, type=types[n % 5]) for n in range(100)}
    models |= {"model-98": fake(vram_mib=5000), "model-99": gguf(vram_mib=4)}
    with running(tmp_path, {"models": models, "limits": {"loads_per_device": 12}}) as daemon:
        for n in range(12):
            daemon.post("/models/load", json={"model": f"model-{n}"}).raise_for_status()
        wait_until(lambda: len(daemon.get("/health").json()["models_loaded"]) == 12)
        yield daemon


class TestManyModels:
    """A hundred of them: the loaded ones first, no two of which look alike, the rest by type, folded; warnings are told
    also of those.
    """

    def test_are_grouped_warned_of_and_told_apart(self, crowd, open_page):
        (huge,), (little,) = (crowd.model(name)["warnings"] for name in ["model-98", "model-99"])
        page = open_page(crowd)
        groups = page.locator("tr.group")
        expect(groups.first).to_contain_text("Loaded 12")
        assert [text.split()[0] for text in groups.all_inner_texts()] == ["Loaded", "llm", "asr", "embedding", "tts"]
        assert page.locator("tr[data-model]").count() == 12
        told = page.get_by_role("list", name="Memory warnings").get_by_role("listitem")
        expect(told).to_have_text([f"model-98: {huge}", f"model-99: {little}"])
        assert violations(page, "many") == []
        page.get_by_role("button", name="embedding").click()
        expect(row(page, "model-14")).to_be_visible()
        search = page.get_by_label("Filter the models")
        search.fill("model-77")
        expect(page.locator("tr[data-model]")).to_have_count(1)
        expect(row(page, "model-77")).to_be_visible()
        search.fill("model-98")
        expect(row(page, "model-98").get_by_role("link", name="warning")).to_have_attribute("title", huge)
        told.get_by_role("link", name="model-99").click()
        model = page.get_by_role("dialog", name="model-99")
        expect(model.get_by_role("list", name="Memory warnings")).to_have_text(little)
        size = crowd.model("model-99")["sizing"]["text"].removeprefix("context ")
        expect(model.locator("dt", has_text="Context").locator("+ dd")).to_have_text(size)
        page.keyboard.press("Escape")
        page.get_by_role("link", name="Daemon", exact=True).click()
        page.get_by_role("button", name="Check").click()
        expect(told).to_have_text([f"model-98: {huge}", f"model-99: {little}"])

        visit(page, "")
        segments = page.locator(".segment[data-model]")
        colours = "parts => new Set(parts.map(part => getComputedStyle(part.querySelector('i')).backgroundColor)).size"
        expect(segments).to_have_count(12)
        assert segments.evaluate_all(colours) == 12
        expect(page.locator(".chart.whole figcaption")).to_contain_text("model-0")
        for n in range(12):  # the ones that were unloaded keep their colours in the charts
            crowd.post(f"/v1/admin/models/model-{n}/unload").raise_for_status()
            crowd.post(f"/v1/admin/models/model-{n + 12}/load").raise_for_status()
        for n in range(12, 24):
            segment(page, f"model-{n}").wait_for()
        expect(segments).to_have_count(12)
        assert segments.evaluate_all(colours) == 12


@pytest.fixture
def broken_config(empty: Daemon) -> Iterator[Callable[[], None]]:
    """Puts a mistake into the configuration; it is taken out again after the test."""
    good = empty.config_path.read_text()
    yield lambda: empty.config_path.write_text(good.replace("runtime: command", "runtime: comand", 1))
    empty.config_path.write_text(good)
    assert empty.post("/v1/admin/reload").status_code == 200


class TestDaemon:
    """Which daemon it is, and what a reload would do."""

    def test_is_told_and_checks_before_it_reloads(self, empty, broken_config, open_page):
        info = empty.get("/v1/admin/info").json()
        page = open_page(empty, "daemon")
        about = page.get_by_role("region", name="This daemon")
        for text in [f"llmux {info['version']}", f"pid {empty.process.pid}", str(empty.config_path)]:
            expect(about).to_contain_text(text)
        page.get_by_role("button", name="Check").click()
        expect(page.get_by_role("main")).to_contain_text("The configuration is right. Nothing would change.")
        broken_config()
        for button, said in [("Check", "A reload would change nothing"), ("Reload", "Nothing was changed")]:
            page.get_by_role("button", name=button, exact=True).click()
            expect(page.get_by_role("alert")).to_contain_text("1 mistake")
            expect(page.get_by_role("alert")).to_contain_text(said)
            expect(page.locator(".mistakes")).to_contain_text("no such runtime; did you mean")
