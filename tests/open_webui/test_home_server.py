"""The home server of config/examples/home-16gb in a browser: what the second phase of its page lists, with tiny models.

Open WebUI is set up by the variables of deploy/compose/compose.yaml alone, and by a key: nobody enters anything.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from playwright.sync_api import Browser, ViewportSize, expect

from tests.e2e.home_server.conftest import HomeServer
from tests.e2e.home_server.conftest import home as home  # a fixture
from tests.e2e.home_server.test_requests import GRADED, HYBRID, VOICES
from tests.open_webui.conftest import PATIENCE_MS, OpenWebUi, Visitor
from tests.support import hearing, tiny
from tests.support.asking import picture
from tests.support.daemon import REPOSITORY, wait_until

THINKING = [names[0] for names in HYBRID.values()] + [name for names in GRADED.values() for name in names]
INSTRUCT = [names[1] for names in HYBRID.values()]
CHOOSE_VOICE = """async (model) => {
  const headers = {authorization: `Bearer ${localStorage.token}`, "content-type": "application/json"};
  const config = await (await fetch("/api/v1/audio/config", {headers})).json();
  config.tts.MODEL = model;
  const body = JSON.stringify(config);
  return (await fetch("/api/v1/audio/config/update", {method: "POST", headers, body})).status;
}"""
SPEAK = """async (language) => {
  const headers = {authorization: `Bearer ${localStorage.token}`, "content-type": "application/json"};
  const settings = await (await fetch("/api/v1/users/user/settings", {headers})).json();
  const ui = {...settings?.ui, audio: {...settings?.ui?.audio, stt: {language}}};
  const body = JSON.stringify({...settings, ui});
  return (await fetch("/api/v1/users/user/settings/update", {method: "POST", headers, body})).status;
}"""
SEEING = [names[1] for names in HYBRID.values()]


QUIET = {
    # Its descriptions of its own tools are 6000 tokens of a real model, but more than the context of these, who read letters.
    "DEFAULT_MODEL_METADATA": '{"capabilities": {"builtin_tools": false}}',
    "ENABLE_TITLE_GENERATION": "False",
    "ENABLE_TAGS_GENERATION": "False",
    "ENABLE_FOLLOW_UP_GENERATION": "False",
}


def variables(home: HomeServer) -> dict[str, str]:
    """Those of the Compose file, for this address and these models."""
    service = yaml.safe_load((REPOSITORY / "deploy" / "compose" / "compose.yaml").read_text())["services"]["open-webui"]
    names = {"STT_MODEL": "cohere-transcribe", "TTS_MODEL": "Chatterbox-Multilingual", "TTS_VOICE": "anna"}
    found = {
        name: re.sub(r"\$\{(\w+):-(\w+)\}", lambda default: names.get(default[1], default[2]), value)
        for name, value in service["environment"].items()
    }
    keys = re.findall(r"(\w+API_KEY)=", service["command"][-1])
    found = {name: value.replace("http://llmux:8081", home.url) for name, value in found.items()}
    return found | dict.fromkeys(keys, home.keys["Open WebUI"]) | QUIET


class Guest(Visitor):
    """Who also shows pictures, and looks up what llmux told Open WebUI."""

    def heard(self) -> dict[str, Any]:
        """The last transcription, as Open WebUI keeps it."""
        kept = self._webui.log_path.parent.glob("data/cache/audio/transcriptions/*.json")
        return json.loads(max(kept, key=lambda path: path.stat().st_mtime_ns).read_text())

    def show_picture(self) -> None:
        shown = {"name": "cat.png", "mimeType": "image/png", "buffer": base64.b64decode(picture().partition(",")[2])}
        self.page.locator("input[type=file]").first.set_input_files(shown)
        self.page.get_by_alt_text("cat.png").or_(self.page.locator("form img")).first.wait_for()


@pytest.fixture(scope="module")
def at_home(
    browser: Browser, open_webui, home: HomeServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guest]:
    """Somebody who opens it for the first time."""
    served = OpenWebUi(open_webui, tmp_path_factory.mktemp("open-webui-home"), home.url, **variables(home))
    size: ViewportSize = {"width": 1280, "height": 800}
    context = browser.new_context(viewport=size, permissions=["microphone"], reduced_motion="reduce")
    context.set_default_timeout(3 * PATIENCE_MS)
    try:
        wait_until(served.answers, timeout_s=600, what=f"Open WebUI serves; its log: {served.log_path}")
        visitor = Guest(context.new_page(), served)
        visitor.go()
        visitor.page.get_by_role("button", name="Okay, Let's Go!").click()
        yield visitor
    finally:
        context.close()
        served.process.terminate()
        served.process.wait(60)


def model_of(name: str) -> str:
    """The one behind a chat's name."""
    return next(model for model, names in (HYBRID | GRADED).items() if name in names)


class TestPhaseTwo:
    """In the order of the page."""

    def test_sixteen_names(self, at_home):
        at_home.go()
        at_home.page.locator("#model-selector-model-button").last.click()
        names = [*THINKING, *INSTRUCT, *VOICES, "cohere-transcribe"]
        for name in names:
            at_home.page.get_by_label(f"Select {name} model").first.wait_for(state="attached")
        assert len(names) == 16

    @pytest.mark.parametrize("name", [*THINKING, *INSTRUCT])
    def test_chat(self, at_home, home, name):
        """An answer; with a thought that is folded away, or without one. Loaded before, it has no news of a load."""
        home.given(model_of(name))
        at_home.begin(name)
        at_home.say("Hello")
        at_home.read(tiny.ANSWER)
        thought = at_home.page.locator("[id^=message-]").get_by_text("Thought for")
        expect(thought).to_have_count(0) if name in INSTRUCT else thought.last.wait_for()

    @pytest.mark.parametrize("name", SEEING)
    def test_sees(self, at_home, home, name):
        home.given(model_of(name))
        at_home.begin(name)
        at_home.show_picture()
        at_home.say("What is this?")
        at_home.read(tiny.ANSWER)

    @pytest.mark.parametrize(("language", "code"), [("", "en"), ("de", "de")], ids=["english", "german"])
    def test_dictation(self, at_home, language, code):
        """In English unless the person's own settings name another language."""
        assert at_home.page.evaluate(SPEAK, language) == 200
        at_home.begin("Qwen3.5-4B-Instruct")
        at_home.page.locator("#voice-input-button").click()
        at_home.page.get_by_text(re.compile(r"\d:0[1-9]")).first.wait_for()  # a second was recorded
        with at_home.page.expect_response(lambda answer: "/audio/transcriptions" in answer.url) as told:
            at_home.page.get_by_role("button", name="Confirm recording").last.click()
        assert told.value.status == 200
        expect(at_home.page.locator("#chat-input")).to_have_text(
            re.compile(hearing.COHERE_SAID, re.IGNORECASE), timeout=3 * PATIENCE_MS
        )
        assert at_home.heard()["metrics"]["language"] == code

    def test_who_sees_nothing_says_so(self, at_home):
        """So the picture did come with the question."""
        at_home.begin("GPT-OSS-20B-Low")
        at_home.show_picture()
        at_home.say("What is this?")
        at_home.page.locator("[id^=message-]").get_by_text("GPT-OSS-20B-Low takes text").last.wait_for()

    @pytest.mark.parametrize("name", VOICES)
    def test_reading_aloud(self, at_home, home, name):
        """In each voice, as the administrator has chosen it."""
        assert at_home.page.evaluate(CHOOSE_VOICE, name) == 200
        at_home.begin("Qwen3.5-4B-Instruct")
        at_home.say("Hello")
        at_home.read(tiny.ANSWER)
        with at_home.page.expect_response(lambda answer: "/audio/speech" in answer.url) as told:
            at_home.page.get_by_role("button", name="Read Aloud").last.click()
        assert told.value.status == 200
        assert told.value.headers["content-type"].startswith("audio/mpeg")
        assert name.lower() in home.loaded()
