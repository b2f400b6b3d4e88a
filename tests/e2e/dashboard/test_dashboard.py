"""The dashboard as people use it: a real browser, a real daemon, real workers."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.e2e.dashboard.conftest import KEY, row, segment
from tests.support.daemon import wait_until

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154"
    "78da6360f8cf00000301010018dd8db00000000049454e44ae426082"
)

ASK_LATE = """async () => {
    const load = (name) => import(new URL(`js/${name}.js`, document.baseURI));
    const [{ get }, { state }] = await Promise.all([load("api"), load("state")]);
    get("/v1/admin/models?late").catch((error) => (window.late = [error.status, state.link]));
}"""


class TestOperator:
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

    def test_sees_the_reason_of_an_eviction(self, empty, open_page):
        empty.post("/v1/admin/models/qwen-small/load")
        page = open_page(empty)
        expect(row(page, "qwen-small")).to_contain_text("ready")
        assert empty.chat("qwen-large").status_code == 200
        expect(row(page, "qwen-small")).to_contain_text("stopped")
        why = page.locator(".decisions li").filter(has_text="evicted")
        expect(why.first).to_contain_text("qwen-small")
        large, bar = segment(page, "qwen-large"), page.locator(".bar").bounding_box()
        wait_until(lambda: (large.bounding_box() or {"width": 0})["width"] > 0.8 * bar["width"])

    def test_reads_why_a_load_failed(self, empty, open_page):
        page = open_page(empty)
        row(page, "broken").get_by_role("button", name="Load").click()
        expect(row(page, "broken")).to_contain_text("out of memory")
        row(page, "broken").get_by_role("link", name="broken").click()
        expect(page.get_by_role("dialog")).to_contain_text("CUDA error: out of memory")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)

    def test_follows_a_log(self, empty, open_page):
        empty.post("/v1/admin/models/kokoro/load")
        page = open_page(empty, "models/kokoro/log")
        log = page.get_by_role("log")
        expect(log).to_contain_text("kokoro speaks")
        empty.post("/v1/audio/speech", json={"model": "kokoro", "input": "Hello", "voice": "any"})
        expect(log).to_contain_text("POST /v1/audio/speech")

    def test_cancels_a_request(self, empty, open_page):
        page = open_page(empty, "playground/chat")
        page.get_by_role("combobox", name="Model").select_option("slow")
        page.get_by_label("Message").fill("Take your time")
        page.keyboard.press("Enter")
        expect(page.locator(".turn.assistant .prose")).to_contain_text("Hello")
        other = open_page(empty)
        expect(row(other, "slow")).to_contain_text("1 in flight")
        other.get_by_role("button", name="Cancel request").click()
        expect(other.get_by_role("list", name="In flight and queued").get_by_role("listitem")).to_have_count(0)
        expect(page.locator(".turn.assistant .problem")).to_contain_text("cancelled")

    def test_pins(self, empty, open_page):
        page = open_page(empty)
        button = row(page, "embedder").get_by_role("button", name="Pin embedder")
        for pinned in [True, False]:
            button.click()
            expect(button).to_have_attribute("aria-pressed", str(pinned).lower())
            assert empty.model("embedder")["pin"] is pinned

    def test_loads_with_another_setting(self, empty, open_page):
        page = open_page(empty, "models/tiny-chat/settings")
        page.get_by_label("Context, in tokens").fill("1024")
        page.get_by_role("button", name="Load once").click()
        expect(page.get_by_role("dialog")).to_contain_text("ready")
        assert empty.model("tiny-chat")["overrides"] == {"n_ctx": 1024}
        assert "memory_used_mib:host" in empty.get("/v1/admin/history").json()["series"]
        page.keyboard.press("Escape")
        expect(page.locator(".chart canvas")).to_have_count(4)

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

    @pytest.mark.parametrize("path", ["nothing/here", "100%", "models/no-such-model"])
    def test_follows_an_old_link_to_the_overview(self, empty, open_page, path):
        page = open_page(empty, path)
        expect(row(page, "tiny-chat")).to_be_visible()
        expect(page.locator("nav [aria-current=page]")).to_have_text("Overview")

    def test_finds_no_sideways_scrolling_on_a_phone(self, empty, open_page):
        empty.post("/v1/admin/models/embedder/load")
        page = open_page(empty, width=360, height=740)
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
            page.evaluate("path => (location.hash = `#/${path}`)", path)
            page.locator(
                "dialog .tabs" if path.startswith("models/") else f'nav [aria-current][href="#/{path.split("/")[0]}"]'
            ).wait_for()
            page.locator("main .panel").first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, path

    def test_chooses_a_theme_that_stays(self, empty, open_page):
        page = open_page(empty, theme="light")

        def paper() -> str:
            return page.evaluate("getComputedStyle(document.body).backgroundColor")

        light = paper()
        page.get_by_role("button", name="Theme: as the system").click()
        page.get_by_role("button", name="Theme: light").click()
        dark = paper()
        page.reload()
        page.get_by_role("button", name="Theme: dark").wait_for()
        assert light != dark == paper()


class TestPlayground:
    def test_sends_pasted_pictures(self, empty, open_page):
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

    def test_speaks(self, empty, open_page):
        page = open_page(empty, "playground/speech")
        page.get_by_label("Format").select_option("wav")
        page.get_by_role("button", name="Speak").click()
        sound = page.locator("audio")
        sound.wait_for()
        wait_until(lambda: sound.evaluate("sound => sound.duration") == 1.0)

    def test_transcribes_the_microphone(self, empty, open_page):
        page = open_page(empty, "playground/transcription")
        page.get_by_role("button", name="Record").click()
        page.get_by_role("button", name=re.compile(r"Stop and transcribe .\d+ s")).click()
        expect(page.get_by_label("Transcript", exact=True)).to_have_text("16000 Hz, 1 channel, heard True")

    def test_makes_pictures(self, empty, open_page):
        page = open_page(empty, "playground/images")
        page.get_by_label("Number").fill("2")
        page.get_by_role("button", name="Make").click()
        pictures = page.locator(".pictures img")
        expect(pictures).to_have_count(2)
        wait_until(lambda: pictures.first.evaluate("picture => picture.naturalWidth") == 96)

    @pytest.mark.parametrize(("kind", "label", "value"), [("speech", "Format", "mp3"), ("images", "Size", "512x512")])
    def test_shows_what_is_chosen(self, empty, open_page, kind, label, value):
        page = open_page(empty, f"playground/{kind}")
        expect(page.get_by_label(label)).to_have_value(value)

    def test_compares_texts(self, empty, open_page):
        page = open_page(empty, "playground/embeddings")
        page.get_by_label("Texts").fill("listen\nsilent\nbox")
        page.get_by_role("button", name="Compare").click()
        cells = page.locator(".similarity tbody tr").first.locator("td").all_inner_texts
        wait_until(lambda: cells() == ["listen", "1.000", "1.000", "0.000"])


class TestKey:
    """Where keys are configured the page asks for one, once."""

    def test_is_asked_for_once(self, locked, open_page):
        page = open_page(locked)
        prompt = page.get_by_role("dialog", name="API key")
        prompt.get_by_label("Key", exact=True).fill("sk-llmux-not-this-one-0123456789")
        page.keyboard.press("Enter")
        expect(prompt.get_by_role("alert")).to_contain_text("not known")
        prompt.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        expect(prompt).to_have_count(0)
        expect(row(page, "plain")).to_be_visible()
        page.reload()
        expect(row(page, "plain")).to_be_visible()
        expect(prompt).to_have_count(0)
        page.get_by_role("link", name="Connect").click()
        expect(page.get_by_label("curl", exact=True)).not_to_contain_text(KEY)
        page.get_by_role("button", name="Forget the key").click()
        expect(prompt).to_be_visible()

    def test_a_late_refusal_of_the_last_key_asks_for_none(self, locked, open_page):
        page = open_page(locked)
        prompt = page.get_by_role("dialog", name="API key")
        prompt.get_by_label("Key", exact=True).fill("sk-llmux-not-this-one-0123456789")
        page.keyboard.press("Enter")
        expect(prompt.get_by_role("alert")).to_contain_text("not known")
        asked = []
        page.route("**/v1/admin/models?late", lambda route: asked.append(route))  # it wants a function in Python
        with page.expect_request("**/v1/admin/models?late"):
            page.evaluate(ASK_LATE)
        prompt.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        expect(row(page, "plain")).to_be_visible()
        wait_until(lambda: page.evaluate("true") and asked)
        asked[0].continue_()
        wait_until(lambda: page.evaluate("window.late") is not None)
        assert page.evaluate("window.late") == [401, "live"]

    def test_stays_in_the_tab_unless_it_is_to_be_remembered(self, locked, open_page):
        for remember, kept in [(False, False), (True, True)]:
            page = open_page(locked)
            prompt = page.get_by_role("dialog", name="API key")
            prompt.get_by_label("Key", exact=True).fill(KEY)
            prompt.get_by_label("Remember").set_checked(remember)
            prompt.get_by_role("button", name="Continue").click()
            expect(row(page, "plain")).to_be_visible()
            assert page.evaluate("localStorage.getItem('llmux.key')") == (KEY if kept else None)
            assert page.evaluate("sessionStorage.getItem('llmux.key')") == (None if kept else KEY)


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


class TestPictures:
    """Pictures for the README; and that both themes and a phone show everything there is."""

    def test_of_a_busy_day(self, empty, open_page, screenshot):
        for name in ["qwen-large", "qwen-small", "whisper", "kokoro", "painter", "tiny-chat"]:
            assert empty.post(f"/v1/admin/models/{name}/load").status_code == 200
        for _ in range(3):
            empty.chat("assistant")
        chat = open_page(empty, "playground/chat")
        chat.get_by_role("combobox", name="Model").select_option("slow")
        chat.get_by_label("Message").fill("Take your time")
        chat.keyboard.press("Enter")
        for name in ["light", "dark"]:
            page = open_page(empty, theme=name, height=1240)
            expect(page.locator(".segment[data-model]")).to_have_count(6)
            expect(row(page, "slow")).to_contain_text("1 in flight")
            screenshot(page, name)
        phone = open_page(empty, width=360, height=740)
        expect(phone.locator(".legend li a")).to_have_count(6)
        screenshot(phone, "phone")
