"""The dashboard as people use it: a real browser, a real daemon, real workers."""

from __future__ import annotations

import json
import re
from functools import partial

from playwright.sync_api import Request, Route, expect

from tests.e2e.dashboard.conftest import row, segment, visit, wait_fit
from tests.support.daemon import Daemon, wait_until

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154"
    "78da6360f8cf00000301010018dd8db00000000049454e44ae426082"
)


NOTE_TEXTS = """() => {
    window.drawn = [];
    const draw = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
        window.drawn.push(text);
        draw.call(this, text, ...rest);
    };
}"""


def sampled(daemon: Daemon, model: str) -> None:
    def is_there() -> bool:
        series = daemon.get("/v1/admin/history").json()["series"].get(f"worker_memory_mib:host/{model}", [None])
        return series[-1] is not None

    wait_until(is_there, what=f"the memory of {model} is in the history")


def is_of_no_stream(request: Request) -> bool:
    return request.url.endswith("/v1/images/generations") and not request.post_data_json.get("stream")


def refuse(route: Route, *, is_cold: bool) -> None:
    """Streams. What is refused while a model loads comes in the stream that has begun."""
    error = json.dumps({"error": {"message": "No streams.", "type": "invalid_request_error", "code": "unsupported"}})
    if is_of_no_stream(route.request):
        route.continue_()
    elif is_cold:
        route.fulfill(content_type="text/event-stream", body=f": waiting\n\ndata: {error}\n\n")
    else:
        route.fulfill(status=400, content_type="application/json", body=error)


class TestOperator:
    """What a day brings: loads, answers, mistakes, evictions, by mouse and by keyboard, on a phone, too."""

    def test_loads_sees_the_bar_grow_chats_unloads_and_reads_why(self, empty, open_page):
        page = open_page(empty)
        bar = page.locator(".bar").first
        expect(bar).to_have_attribute("aria-label", re.compile(r"0 MiB leased to 0 workers"))
        row(page, "tiny-chat").get_by_role("button", name="Load").click()
        expect(row(page, "tiny-chat")).to_contain_text("ready")
        segment(page, "tiny-chat").wait_for()
        assert segment(page, "tiny-chat").bounding_box()["width"] > 0
        expect(bar).to_have_attribute("aria-label", re.compile(r"leased to 1 workers"))

        page.get_by_role("link", name="Playground").click()
        page.get_by_role("combobox", name="Model").select_option("assistant")
        page.get_by_label("Message").fill("Hello")
        page.keyboard.press("Enter")
        expect(page.locator(".turn.assistant .prose")).to_have_text("Hello from a tiny model")
        thought = page.locator("details.thought")
        expect(thought).not_to_have_attribute("open", "")
        thought.locator("summary").click()
        expect(thought).to_contain_text("pondering")

        page.get_by_role("link", name="Overview").click()
        row(page, "tiny-chat").get_by_role("button", name="Unload").click()
        expect(row(page, "tiny-chat")).to_contain_text("stopped")
        expect(segment(page, "tiny-chat")).to_have_count(0)

        page.get_by_role("navigation").get_by_role("link", name="Decisions").click()
        page.get_by_role("combobox", name="Model").select_option("tiny-chat")
        reason = empty.decisions("tiny-chat")[-1]["reason"]
        expect(page.locator(".decisions")).to_contain_text(reason)

    def test_reads_why_a_load_failed_and_a_model_went(self, empty, open_page):
        page = open_page(empty)
        row(page, "broken").get_by_role("button", name="Load").click()
        expect(row(page, "broken")).to_contain_text("out of memory")
        row(page, "broken").get_by_role("link", name="broken").click()
        expect(page.get_by_role("dialog")).to_contain_text("CUDA error: out of memory")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)

        empty.post("/v1/admin/models/qwen-small/load")
        expect(row(page, "qwen-small")).to_contain_text("ready")
        sampled(empty, "qwen-small")
        assert empty.chat("qwen-large").status_code == 200
        expect(row(page, "qwen-small")).to_contain_text("stopped")
        why = page.locator(".decisions li").filter(has_text="evicted")
        expect(why.first).to_contain_text("qwen-small")
        large, bar = segment(page, "qwen-large"), page.locator(".bar").bounding_box()
        wait_until(lambda: (large.bounding_box() or {"width": 0})["width"] > 0.8 * bar["width"])

        sampled(empty, "qwen-large")
        page.evaluate(NOTE_TEXTS)
        expect(page.locator(".chart.whole figcaption")).to_contain_text("qwen-large")
        evicted = next(each for each in reversed(empty.decisions("qwen-small")) if each["kind"] == "evicted")
        mark = page.locator(".mark").last
        expect(mark).to_have_attribute("title", re.compile(re.escape(f"qwen-small: {evicted['reason']}")))
        wait_until(lambda: page.evaluate("window.drawn.some((text) => /^[1-9]\\d* [MG]iB$/.test(text))"))
        assert not page.evaluate("window.drawn.filter((text) => / Gi$|^\\d{4,}$/.test(text))")
        mark.focus()
        page.keyboard.press("Enter")
        expect(page.locator(".decisions [aria-current=true]")).to_contain_text("evicted")
        expect(page.locator(".decisions [aria-current=true]")).to_be_in_viewport()

    def test_pins_sets_and_chooses_a_theme_that_stays(self, empty, open_page):
        page = open_page(empty)
        button = row(page, "embedder").get_by_role("button", name="Pin embedder")
        for pinned in [True, False]:
            button.click()
            expect(button).to_have_attribute("aria-pressed", str(pinned).lower())
            assert empty.model("embedder")["pin"] is pinned

        visit(page, "models/tiny-chat/settings")
        page.get_by_label("Context, in tokens").fill("1024")
        page.get_by_role("button", name="Load once").click()
        expect(page.get_by_role("dialog")).to_contain_text("ready")
        assert empty.model("tiny-chat")["overrides"] == {"n_ctx": 1024}
        assert "memory_used_mib:host" in empty.get("/v1/admin/history").json()["series"]
        page.keyboard.press("Escape")
        expect(page.locator(".chart canvas")).to_have_count(4)

        def paper() -> str:
            return page.evaluate("getComputedStyle(document.body).backgroundColor")

        light = paper()
        page.get_by_role("button", name="Theme: as the system").click()
        page.get_by_role("button", name="Theme: light").click()
        dark = paper()
        page.reload()
        page.get_by_role("button", name="Theme: dark").wait_for()
        assert light != dark == paper()

    def test_uses_the_keyboard_alone(self, empty, open_page):
        page = open_page(empty)
        page.keyboard.press("?")
        expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        page.keyboard.press("/")
        expect(page.get_by_label("Filter the models")).to_be_focused()
        page.keyboard.type("embed")
        expect(page.locator("tr[data-model]")).to_have_count(1)
        link = page.locator("table").get_by_role("link", name="embedder")
        for _ in range(4):  # past the warnings, where there are any
            page.keyboard.press("Tab")
            if link.evaluate("link => link === document.activeElement"):
                break
        expect(link).to_be_focused()
        page.keyboard.press("l")
        expect(row(page, "embedder")).to_contain_text("ready")
        expect(row(page, "embedder").get_by_role("button", name="Unload")).to_be_enabled()  # the load is answered
        page.keyboard.press("u")
        expect(row(page, "embedder")).to_contain_text("stopped")
        expect(row(page, "embedder").get_by_role("button", name="Load", exact=True)).to_be_enabled()
        page.keyboard.press("Tab")
        expect(row(page, "embedder").get_by_role("button", name="Load")).to_be_focused()
        page.keyboard.press("Enter")
        expect(row(page, "embedder")).to_contain_text("ready")

    def test_follows_old_links_on_a_phone_without_sideways_scrolling(self, empty, open_page):
        empty.post("/v1/admin/models/embedder/load")
        page = open_page(empty, "models/no-such-model", width=360)
        for path in [None, "nothing/here", "100%"]:
            if path:
                visit(page, "decisions")
                expect(page.locator("nav [aria-current=page]")).to_have_text("Decisions")
                visit(page, path)
            expect(page.locator("nav [aria-current=page]")).to_have_text("Overview")
            expect(row(page, "tiny-chat")).to_be_visible()
        for path in [
            "",
            "models/embedder/log",
            "playground/chat",
            "playground/embeddings",
            "requests",
            "decisions",
            "connect",
            "daemon",
        ]:
            visit(page, path)
            page.locator(
                "dialog .tabs" if path.startswith("models/") else f'nav [aria-current][href="#/{path.split("/")[0]}"]'
            ).wait_for()
            page.locator("main .panel").first.wait_for()
            wait_fit(page, 360)


class TestPlayground:
    """Each kind of model is tried on its page; one that refuses streams, at once or after a wait, is asked without."""

    def test_each_kind(self, empty, open_page):
        page = open_page(empty, "playground/chat")
        page.get_by_role("combobox", name="Model").select_option("qwen-small")
        picture = {"name": "one.png", "mimeType": "image/png", "buffer": PIXEL}
        page.locator("input[type=file]").set_input_files([picture])
        page.get_by_role("button", name="Remove this image").wait_for()
        page.get_by_label("Message").fill("What is this?")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.get_by_role("button", name="Send").click()
        parts = asked.value.post_data_json["messages"][-1]["content"]
        assert [part["type"] for part in parts] == ["text", "image_url"]
        assert parts[1]["image_url"]["url"].startswith("data:image/png;base64,")
        expect(page.locator(".turn.assistant .prose")).to_have_text("Hello from a fake worker")

        visit(page, "playground/speech")
        expect(page.get_by_label("Format")).to_have_value("mp3")
        page.get_by_label("Format").select_option("wav")
        page.get_by_role("button", name="Speak").click()
        sound = page.locator("audio")
        sound.wait_for()
        wait_until(lambda: sound.evaluate("sound => sound.duration") == 1.0)

        visit(page, "playground/transcription")
        page.get_by_role("button", name="Record").click()
        page.get_by_role("button", name=re.compile(r"Stop and transcribe .\d+ s")).click()
        expect(page.get_by_label("Transcript", exact=True)).to_have_text("16000 Hz, 1 channel, heard True")

        visit(page, "playground/embeddings")
        page.get_by_label("Texts").fill("listen\nsilent\nbox")
        page.get_by_role("button", name="Compare").click()
        cells = page.locator(".similarity tbody tr").first.locator("td").all_inner_texts
        wait_until(lambda: cells() == ["listen", "1.000", "1.000", "0.000"])

        visit(page, "playground/images")
        expect(page.get_by_label("Size")).to_have_value("512x512")
        page.get_by_label("Number").fill("2")
        page.get_by_role("button", name="Make").click()
        pictures = page.locator(".pictures img")
        expect(pictures).to_have_count(2)
        wait_until(lambda: pictures.first.evaluate("picture => picture.naturalWidth") == 96)
        for count, is_cold in [(1, False), (3, True)]:
            page.route("**/v1/images/generations", partial(refuse, is_cold=is_cold))
            page.get_by_label("Number").fill(str(count))
            with page.expect_request(is_of_no_stream):
                page.get_by_role("button", name="Make").click()
            expect(pictures).to_have_count(count)
            expect(page.get_by_text("No streams.")).to_have_count(0)


class TestConnect:
    """The settings to copy are Open WebUI's own fields, with values that work."""

    def test_open_webui(self, site, open_page):
        page = open_page(site, "connect")
        panel = page.get_by_role("region", name="Open WebUI Admin Settings")
        for label, value in [
            ("URL", f"{site.url}/v1"),
            ("Advanced › Provider", "llama.cpp"),
            ("docker run", "--add-host=host.docker.internal:host-gateway"),
            ("STT Model", "whisper"),
            ("TTS Model", "kokoro"),
            ("TTS Voice", "default"),
            ("Embedding Model Engine", "OpenAI"),
            ("Embedding Model", "embedder"),
        ]:
            expect(panel.get_by_label(label, exact=True).first).to_have_text(value)
        container = panel.get_by_label("URL", exact=True).nth(1)
        expect(container).to_have_text(f"http://host.docker.internal:{site.port}/v1")


class TestTrouble:
    """The page goes on without events, and after the daemon was away."""

    def test_asks_again_and_again_where_there_are_no_events(self, empty, open_page):
        def absent(route):
            body = {"error": {"message": "There is nothing here.", "code": "not_found"}}
            route.fulfill(status=404, json=body)

        page = open_page(empty, routes=[(f"**/v1/admin/{name}", absent) for name in ["events", "history", "requests"]])
        expect(page.locator(".link")).to_have_text("Polling")
        empty.post("/v1/admin/models/embedder/load")
        expect(row(page, "embedder")).to_contain_text("ready")
        for panel in ["Last half hour", "Requests"]:
            expect(page.get_by_role("heading", name=panel)).to_have_count(0)

    def test_says_that_the_daemon_is_away_and_comes_back(self, empty, open_page):
        page = open_page(empty, routes=[("**/v1/admin/**", lambda route: route.abort())])
        expect(page.get_by_role("alert")).to_contain_text("can't be reached")
        page.unroute("**/v1/admin/**")
        expect(page.locator(".link")).to_have_text("Live")
        expect(page.get_by_role("alert")).to_have_count(0)


class TestBusyDay:
    """Both themes and a phone show everything there is; pictures for the README."""

    def test_is_seen_and_a_request_is_cancelled(self, empty, open_page, screenshot):
        for name in ["qwen-large", "qwen-small", "whisper", "kokoro", "painter", "tiny-chat"]:
            assert empty.post(f"/v1/admin/models/{name}/load").status_code == 200
        for _ in range(3):
            empty.chat("assistant")
        chat = open_page(empty, "playground/chat")
        chat.get_by_role("combobox", name="Model").select_option("slow")
        chat.get_by_label("Message").fill("Take your time")
        chat.keyboard.press("Enter")
        expect(chat.locator(".turn.assistant .prose")).to_contain_text("Hello")
        page = open_page(empty, height=1240)
        expect(page.locator(".segment[data-model]")).to_have_count(6)
        expect(row(page, "slow")).to_contain_text("1 in flight")
        for theme in ["light", "dark"]:
            page.emulate_media(color_scheme=theme)
            screenshot(page, theme)
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 360, "height": 740})
        expect(page.locator(".legend li a")).to_have_count(6)
        screenshot(page, "phone")
        page.get_by_role("button", name="Cancel request").click()
        expect(page.get_by_role("list", name="In flight and queued").get_by_role("listitem")).to_have_count(0)
        expect(chat.locator(".turn.assistant .problem")).to_contain_text("cancelled")
