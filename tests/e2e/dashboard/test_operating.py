"""What an operator does with the dashboard on a busy day: requests, logs, memory, many models, reloads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from supervisor.http.watch import RESTARTED
from tests.e2e.dashboard.conftest import KEY, row
from tests.support.daemon import Daemon, fake, running, wait_until


def ended(page: Page) -> list[str]:
    return page.locator(".ended-table tbody a").all_inner_texts()


class TestRequests:
    """The last thousand, as the daemon keeps them: also those from before the page was opened."""

    def test_are_found_by_model_failure_and_text(self, empty, open_page):
        empty.chat("qwen-small")
        empty.chat("tiny-chat")
        empty.chat("never-heard-of")
        page = open_page(empty, "requests")
        page.locator(".ended-table").wait_for()
        assert ended(page)[:3] == ["never-heard-of", "tiny-chat", "qwen-small"]
        page.get_by_label("Failed only").check()
        expect(page.locator(".ended-table")).not_to_contain_text("tiny-chat")
        expect(page.locator(".ended-table tbody tr").first).to_contain_text("404 model_not_found")
        page.get_by_label("Failed only").uncheck()
        page.get_by_label("Text").fill("never-heard")
        wait_until(lambda: set(ended(page)) == {"never-heard-of"})
        page.get_by_label("Text").fill("")
        page.get_by_role("combobox", name="Model").select_option("qwen-small")
        wait_until(lambda: set(ended(page)) == {"qwen-small"})
        empty.chat("qwen-small")
        wait_until(lambda: len(ended(page)) >= 2)  # as it happens

    def test_one_tells_its_wait_in_parts(self, empty, open_page):
        assert empty.chat("qwen-small").status_code == 200
        page = open_page(empty, "requests")
        page.locator(".ended-table tbody tr").first.click()
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

    def test_many_alike_are_one_line_to_cancel(self, empty, clients, open_page):
        clients.begin("slow", 5)
        page = open_page(empty)
        flying = page.get_by_role("list", name="In flight and queued")
        line = flying.get_by_role("listitem")
        expect(line).to_have_count(1)
        expect(line).to_contain_text(re.compile(r"5 (running|queued) for slow"))
        line.get_by_role("button", name=re.compile("running|queued")).first.click()
        expect(line).to_have_count(6)
        page.get_by_role("button", name="Cancel all 5").click()
        page.get_by_role("dialog", name="Cancel 5 requests").get_by_role("button", name="Cancel all 5").click()
        expect(line).to_have_count(0)
        clients.join()
        assert len(clients.ends) == 5
        assert all("cancelled by an operator" in end or end.startswith("cut") for end in clients.ends)


class TestClients:
    """Who asked is a table, from which one is paused."""

    def test_one_is_paused_and_goes_on(self, empty, open_page):
        said = {"x-tenant-id": "amy", "x-priority": "high"}
        body = {"model": "qwen-small", "messages": []}
        assert empty.post("/v1/chat/completions", json=body, headers=said).status_code == 200
        page = open_page(empty, "requests")
        expect(page.locator(".ended-table tbody tr").first).to_contain_text("amy · priority 20")
        amy = page.locator(".clients-table tbody tr", has_text="amy")
        amy.get_by_role("button", name="Pause amy").click()
        expect(amy).to_contain_text("pauses")
        assert empty.post("/v1/chat/completions", json=body, headers=said).status_code == 429
        amy.get_by_role("button", name="Resume amy").click()
        expect(amy).not_to_contain_text("pauses")
        assert empty.post("/v1/chat/completions", json=body, headers=said).status_code == 200


class TestTasks:
    """Whom a task's request would go to, and the guard against cloud fallbacks."""

    def test_follow_the_models_and_the_guard(self, tmp_path, open_page):
        cloud = {"runtime": "openai_remote", "base_url": "http://127.0.0.1:9/v1", "upstream_model": "large"}
        config = {
            "models": {"first": fake(), "second": fake(), "cloud": cloud},
            "tasks": {"titles": {"candidates": ["first", "second", "cloud"]}},
        }
        with running(tmp_path, config) as daemon:
            page = open_page(daemon)
            task = page.locator(".tasks-table tbody tr", has_text="titles")
            expect(task.locator("li", has_text="next")).to_contain_text("first")
            daemon.post("/v1/admin/models/second/load").raise_for_status()
            expect(task.locator("li", has_text="next")).to_contain_text("second")
            expect(task).to_contain_text("second is ready, and first, which would come first, is not.")
            guard = page.get_by_label("Remote models may answer")
            expect(guard).to_be_checked()
            guard.uncheck()
            expect(task.locator("li.muted")).to_contain_text("cloud")
            assert daemon.get("/api/v1/config").json() == {"allowCloudFallback": False}


class TestReplicas:
    """One row for a model; its replicas are told in it, in the memory and in the decisions."""

    def test_are_one_model(self, tmp_path, open_page):
        with running(tmp_path, {"models": {"pair": fake("--take-mib", "20", replicas=2)}}) as daemon:
            page = open_page(daemon)
            row(page, "pair").get_by_role("button", name="Load").click()
            expect(row(page, "pair")).to_contain_text("ready ×2")
            expect(page.locator("tr[data-model]")).to_have_count(1)
            page.locator(".legend a", has_text="pair#2").click()
            dialog = page.get_by_role("dialog", name="pair")
            expect(dialog.locator(".decisions")).to_contain_text("pair#2")
            dialog.get_by_role("link", name="About").click()
            expect(dialog.locator(".facts")).to_contain_text(re.compile(r"pair#2:\d+: ready on host"))
            page.keyboard.press("Escape")
            row(page, "pair").get_by_role("button", name="Unload").click()
            expect(row(page, "pair")).to_contain_text("stopped")
            expect(page.locator(".segment")).to_have_count(0)


class TestUnload:
    """It says first for whom it matters."""

    def test_that_is_forced_cuts_and_refuses(self, empty, clients, open_page):
        clients.begin("single", 3)
        page = open_page(empty)
        expect(row(page, "single")).to_contain_text("2 queued")
        row(page, "single").get_by_role("button", name="Unload").click()
        question = page.get_by_role("dialog", name="Unload single")
        for text in [
            "1 request running on it",
            "2 requests waiting for it",
            "The next request for single loads it again",
        ]:
            expect(question).to_contain_text(text)
        page.keyboard.press("Escape")
        expect(question).to_have_count(0)
        assert empty.model("single")["in_flight"] == 1
        row(page, "single").get_by_role("button", name="Unload").click()
        question.get_by_role("button", name="Cut it off now").click()
        expect(row(page, "single")).to_contain_text("stopped")
        clients.join()
        assert sum("model_unloaded" in end for end in clients.ends) >= 2

    def test_that_waits_is_followed_by_a_load_for_those_that_wait(self, empty, clients, open_page):
        clients.begin("single", 2)
        before = wait_until(lambda: (view := empty.model("single"))["queued"] == 1 and view["generation"])
        page = open_page(empty)
        expect(row(page, "single")).to_contain_text("1 queued")
        row(page, "single").get_by_role("button", name="Unload").click()
        question = page.get_by_role("dialog", name="Unload single")
        expect(question).to_contain_text("get up to 1.0 s more; what is left then is cut off")
        expect(question).to_contain_text("The waiting ones stay, and load it again right after.")
        question.get_by_role("button", name="Unload when done").click()
        wait_until(lambda: (view := empty.model("single"))["generation"] > before and view["in_flight"] == 1)


class TestLog:
    """A model's log is searched, wrapped and taken along."""

    def test_is_searched_wrapped_and_downloaded(self, empty, open_page):
        empty.post("/v1/admin/models/kokoro/load")
        for _ in range(3):
            empty.post("/v1/audio/speech", json={"model": "kokoro", "input": "Hello", "voice": "any"})
        page = open_page(empty, "models/kokoro/log")
        log = page.get_by_role("log")
        expect(log).to_contain_text("asked for /v1/audio/speech")
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


class TestMemory:
    """The last half hour by model; an eviction leads to its reason."""

    def test_the_axis_is_in_whole_units(self, empty, open_page):
        page = open_page(empty)
        page.add_init_script(
            "window.drawn = []; const draw = CanvasRenderingContext2D.prototype.fillText;"
            "CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {"
            "  window.drawn.push(text); draw.call(this, text, ...rest);"
            "};"
        )
        page.reload()
        wait_until(lambda: page.evaluate("window.drawn.some((text) => /^[1-9]\\d* [MG]iB$/.test(text))"))
        assert not page.evaluate("window.drawn.filter((text) => / Gi$|^\\d{4,}$/.test(text))")

    def test_an_eviction_is_marked_and_says_why(self, empty, open_page):
        def sampled(model: str) -> bool:
            series = empty.get("/v1/admin/history").json()["series"].get(f"worker_memory_mib:host/{model}", [None])
            return series[-1] is not None

        empty.post("/v1/admin/models/qwen-small/load")
        wait_until(lambda: sampled("qwen-small"), what="its memory is in the history")
        assert empty.chat("qwen-large").status_code == 200
        evicted = next(each for each in reversed(empty.decisions("qwen-small")) if each["kind"] == "evicted")
        wait_until(lambda: sampled("qwen-large"), what="its memory is in the history")
        page = open_page(empty)
        expect(page.locator(".chart.whole figcaption")).to_contain_text("qwen-large")
        mark = page.locator(".mark").last
        assert f"qwen-small: {evicted['reason']}" in mark.get_attribute("title")
        mark.focus()
        page.keyboard.press("Enter")
        expect(page.locator(".decisions [aria-current=true]")).to_contain_text("evicted")
        expect(page.locator(".decisions [aria-current=true]")).to_be_in_viewport()


class TestManyModels:
    """A hundred of them: the loaded ones first, the rest by type, folded."""

    def test_are_grouped(self, crowd, open_page):
        page = open_page(crowd)
        groups = page.locator("tr.group").all_inner_texts
        expect(page.locator("tr.group").first).to_contain_text("Loaded 12")
        assert [text.split()[0] for text in groups()] == ["Loaded", "llm", "asr", "embedding", "tts"]
        assert page.locator("tr[data-model]").count() == 12
        page.get_by_role("button", name="embedding").click()
        expect(row(page, "model-14")).to_be_visible()
        page.get_by_label("Filter the models").fill("model-77")
        expect(page.locator("tr[data-model]")).to_have_count(1)
        expect(row(page, "model-77")).to_be_visible()

    def test_warn_of_their_memory_also_where_folded(self, crowd, open_page):
        (huge,), (little,) = (crowd.model(name)["warnings"] for name in ["model-98", "model-99"])
        page = open_page(crowd)
        expect(row(page, "model-98")).to_have_count(0)
        told = page.get_by_role("list", name="Memory warnings").get_by_role("listitem")
        expect(told).to_have_text([f"model-98: {huge}", f"model-99: {little}"])
        page.get_by_label("Filter the models").fill("model-98")
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


@pytest.fixture
def broken_config(empty: Daemon) -> Iterator[Callable[[], None]]:
    """Puts a mistake into the configuration; it is taken out again after the test."""
    good = empty.config_path.read_text()
    yield lambda: empty.config_path.write_text(good.replace("runtime: command", "runtime: comand", 1))
    empty.config_path.write_text(good)
    assert empty.post("/v1/admin/reload").status_code == 200


class TestDaemon:
    """Which daemon it is, and what a reload would do."""

    def test_says_version_and_files(self, empty, open_page):
        info = empty.get("/v1/admin/info").json()
        page = open_page(empty, "daemon")
        about = page.get_by_role("region", name="This daemon")
        for text in [f"llmux {info['version']}", f"pid {empty.process.pid}", str(empty.config_path)]:
            expect(about).to_contain_text(text)

    def test_checks_before_it_reloads(self, empty, broken_config, open_page):
        page = open_page(empty, "daemon")
        page.get_by_role("button", name="Check").click()
        expect(page.get_by_role("main")).to_contain_text("The configuration is right. Nothing would change.")
        broken_config()
        for button, said in [("Check", "A reload would change nothing"), ("Reload", "Nothing was changed")]:
            page.get_by_role("button", name=button, exact=True).click()
            expect(page.get_by_role("alert")).to_contain_text("1 mistake")
            expect(page.get_by_role("alert")).to_contain_text(said)
            expect(page.locator(".mistakes")).to_contain_text("no such runtime; did you mean")


class TestLoads:
    """What is being loaded, how far it is, and what came of the last ones."""

    def test_one_is_followed_and_cancelled(self, tmp_path, open_page):
        slow = fake("--start-delay", "120", "--log-text", "Loading shards:  40%|####      | 2/5")
        with running(tmp_path, {"models": {"slow": slow, "quick": fake()}}) as daemon:
            daemon.post("/v1/admin/models/quick/load").raise_for_status()
            page = open_page(daemon)
            loads = page.locator(".loads-table tbody tr")
            expect(loads.filter(has_text="quick")).to_contain_text("ready")
            row(page, "slow").get_by_role("button", name="Load").click()
            slow_load = loads.filter(has_text="slow")
            expect(slow_load).to_contain_text("40 %")
            expect(slow_load).to_contain_text("Loading shards")
            slow_load.get_by_role("button", name="Cancel the load of slow").click()
            expect(slow_load).to_contain_text("cancelled by an operator")
            expect(slow_load.get_by_role("button")).to_have_count(0)
            expect(row(page, "slow")).to_contain_text("stopped")


class TestUsage:
    """What each key used, as a table and as a file."""

    @pytest.mark.parametrize(("width", "theme"), [(1280, "dark"), (390, "light")])
    def test_by_key_and_model_and_as_csv(self, tmp_path, open_page, width, theme):
        with running(tmp_path, {"models": {"a": fake(), "b": fake(keep_bodies=True)}}) as daemon:
            for model in ("a", "a", "b"):
                daemon.chat(model, text="What is kept?")
            page = open_page(daemon, "usage", width=width, theme=theme)
            rows = page.locator(".usage-table tbody tr")
            expect(rows).to_have_count(2)  # the total, and the one key
            expect(rows.nth(1)).to_contain_text("(no key)")
            expect(rows.nth(1).locator("td").nth(1)).to_have_text("3")
            page.get_by_label("By model").check()
            expect(rows).to_have_count(3)
            asked = re.compile(r"/v1/admin/usage\?.*by_model=false")
            page.route(asked, lambda _: None)  # not answered before the next question, which takes it back
            page.get_by_label("By model").uncheck()
            with page.expect_event("requestfailed", lambda request: asked.search(request.url)):
                page.get_by_label("By model").check()
            expect(rows).to_have_count(3)
            with page.expect_download() as download:
                page.get_by_role("button", name="Download as CSV").click()
            lines = download.value.path().read_text().splitlines()
            assert lines[0].startswith("day,key,key_id,requests")
            assert len(lines) == 3
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.goto(f"{daemon.url}/ui/#/requests")
            page.get_by_role("link", name="b", exact=True).click()
            expect(page.get_by_label("body", exact=True)).to_contain_text("What is kept?")
