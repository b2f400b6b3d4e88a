"""What a person meets in Open WebUI: chat, thoughts, tools, dictation, speech, documents, loading and ejecting."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.support import hearing, tiny
from tests.support.daemon import wait_until


def answered(site, path: str) -> list[dict]:
    """What the daemon's log says of the requests to this path that it answered well."""
    return [line for line in site.events("request.finished") if line["path"] == path and line["status"] == 200]


class TestOpenWebUi:
    """In the order of a first visit; each works by itself."""

    def test_the_first_hello(self, connected):
        connected.begin("Home-Instruct")
        connected.say("Hello")
        connected.read(tiny.ANSWER)

    def test_thoughts_are_folded_away(self, connected):
        connected.begin("Home-Thinking")
        connected.say("Hello")
        connected.read(tiny.ANSWER)
        connected.page.get_by_text("Thought for").click()
        connected.page.get_by_text(tiny.THOUGHT).last.wait_for()
        connected.picture("chat")

    def test_a_tool_is_called(self, connected):
        connected.begin("Home-Clock")
        connected.say("What time is it?")
        connected.read("It is noon, said the clock")
        connected.page.get_by_text("View Result from get_current_timestamp").wait_for()
        connected.picture("tool")

    def test_a_cold_start_is_told(self, connected):
        connected.begin("sleepy")
        connected.say("Hello")
        connected.page.locator("[id^=message-]").get_by_text("Thinking").last.click()
        connected.page.locator("[id^=message-]").get_by_text("loading sleepy").last.wait_for()
        connected.picture("loading")
        connected.page.get_by_text("Thought for").last.wait_for()  # the news is not part of the answer
        connected.read("Hello from a fake worker")

    def test_why_an_answer_ended_is_told(self, connected, site):
        connected.begin("talker")
        connected.say("Hello")
        connected.page.locator("[id^=message-]").get_by_text("Hello from a fake worker").last.wait_for()
        assert site.post("/v1/admin/models/talker/unload?force=true").status_code == 200
        connected.page.locator("[id^=message-]").get_by_text("unloaded by an operator").last.wait_for()
        assert "TransferEncodingError" not in connected.page.locator("body").inner_text()

    def test_dictation(self, connected):
        connected.begin("Home-Instruct")
        connected.page.locator("#voice-input-button").click()
        connected.page.get_by_text(re.compile(r"\d:0[1-9]")).first.wait_for()  # a second was recorded
        connected.page.get_by_role("button", name="Confirm recording").last.click()
        expect(connected.page.locator("#chat-input")).to_have_text(re.compile(hearing.EXTENSION_FIELDS, re.IGNORECASE))

    def test_reading_aloud(self, connected, site):
        connected.begin("Home-Instruct")
        connected.say("Hello")
        connected.read(tiny.ANSWER)
        with connected.page.expect_response(lambda answer: "/audio/speech" in answer.url) as told:
            connected.page.get_by_role("button", name="Read Aloud").last.click()
        assert told.value.status == 200
        assert told.value.headers["content-type"].startswith("audio/mpeg")
        assert answered(site, "/v1/audio/speech")

    def test_a_document_is_embedded(self, connected, site):
        connected.begin("Home-Instruct")
        text = b"The house has nine models, and one card for all of them. " * 40
        document = {"name": "house.txt", "mimeType": "text/plain", "buffer": text}
        connected.page.locator("input[type=file]").first.set_input_files(document)
        wait_until(lambda: answered(site, "/v1/embeddings"), what="the document is embedded")
        connected.say("How many models has the house?")
        connected.read(tiny.ANSWER)

    def test_load_and_eject(self, connected, site):
        connected.go("/admin/settings/models")
        connected.page.get_by_role("button", name="Actions").click()
        connected.page.get_by_role("menu").get_by_text("Manage").click()
        rows = connected.page.locator("div", has=connected.page.get_by_label("Load Model")).filter(has_text="whisper")
        row = rows.last  # the innermost
        if site.model("whisper")["state"] == "ready":
            row.get_by_role("button", name="Unload Model").click()
            site.wait_state("whisper", "stopped")
        row.get_by_role("button", name="Load Model", exact=True).click()
        site.wait_state("whisper", "ready")
        connected.picture("models")
        connected.begin("Home-Instruct")
        connected.page.locator("#model-selector-model-button").last.click()
        connected.page.get_by_label("Select whisper model").hover()
        connected.page.locator("#model-selector-list > *").filter(has_text="whisper").get_by_role(
            "button", name="Eject model"
        ).click()
        site.wait_state("whisper", "stopped")

    def test_as_an_ollama_connection(self, connected, webui, site):
        webui.connect_ollama(site.url)
        try:
            connected.begin("Home-Clock:latest")
            connected.say("What time is it?")
            connected.read("It is noon, said the clock")
            connected.page.get_by_text("View Result from get_current_timestamp").wait_for()
            assert answered(site, "/api/chat")
        finally:
            webui.connect_ollama()
