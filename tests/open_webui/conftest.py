"""A real Open WebUI in front of a real daemon, and a real Chromium in front of that.

`make test-open-webui` installs it and runs these; elsewhere they are skipped. Open WebUI has its data in a folder of its own
and reaches nothing but the daemon. With LLMUX_SCREENSHOTS=1 the documentation's pictures are taken on the way.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, ViewportSize

from tests.e2e.dashboard.conftest import browser as browser  # a fixture
from tests.support import build_open_webui, environments, fake_chatterbox, hearing, tiny
from tests.support.chatterbox import checkpoint, clip
from tests.support.daemon import REPOSITORY, Daemon, fake, gguf, running, wait_until
from tests.support.ports import quiet_ports

PATIENCE_MS = 60_000
IMAGES = REPOSITORY / "docs" / "images"
TIME_TOOL = {"name": "get_current_timestamp", "arguments": {}}  # one of those that Open WebUI offers to every model


CONTEXT = 65536


def reader(**parameters: Any) -> dict[str, object]:
    """A model that reads 25 kB of tools in a moment: narrower than the others, and one slot has all of its context."""
    path = tiny.model(context=CONTEXT, dim=64, layers=1, heads=1, kv_heads=1, **parameters)
    return gguf(path, n_ctx=CONTEXT, parallel=1)


@pytest.fixture(scope="session")
def open_webui() -> Path:
    program = build_open_webui.find() if os.environ.get("LLMUX_TEST_OPEN_WEBUI") == "1" else None
    if program is None:
        pytest.skip("needs Open WebUI (make test-open-webui installs it, 2.4 GB, and takes minutes)")
    return program


@pytest.fixture(scope="module")
def site(open_webui: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """What a home has: chat with thoughts, a model that calls tools, speech in both directions, embeddings."""
    folder = tmp_path_factory.mktemp("site")
    runtimes_dir = folder / "runtimes"
    runtimes_dir.mkdir()
    for name in ("llama_server", "faster_whisper"):
        (runtimes_dir / name).symlink_to(environments.installed(name) / name)
    fake_chatterbox.environment(runtimes_dir / "chatterbox")
    voice = checkpoint(folder / "voice", "turbo")
    (voice / "conds.pt").write_bytes(b"its own voice")
    clip(folder / "voices" / "anna.wav")
    config = {
        "server": {"runtimes_dir": str(runtimes_dir)},
        "models": {
            "chat": reader(name="quick-chat"),
            "clock": reader(name="quick-clock", answer="It is noon, said the clock", tool_call=TIME_TOOL),
            "whisper": {"runtime": "faster_whisper", "path": str(hearing.converted()), "threads": 1},
            "speaker": {
                "runtime": "chatterbox",
                "path": str(voice),
                "variant": "turbo",
                "voices": str(folder / "voices"),
                "vram_mib": 700,
                "threads": 1,
            },
            "sleepy": fake("--start-delay", "6"),
            "talker": fake("--chunks", "600", "--chunk-delay", "0.5"),
            "embedder": gguf(tiny.model(name="tiny-embed", seed=2), type="embedding", n_ctx=8192),
        },
        "virtual_models": {
            "Home-Thinking": {"model": "chat", "enable_thinking": True},
            "Home-Instruct": {"model": "chat", "enable_thinking": False},
            "Home-Clock": {"model": "clock", "enable_thinking": False},
        },
    }
    with running(folder, config) as daemon:
        yield daemon


class OpenWebUi:
    """One that serves, with an empty database."""

    def __init__(self, program: Path, folder: Path, upstream: str, **further: str) -> None:
        """`further` are variables that count more than those for `site`."""
        self.url = f"http://127.0.0.1:{(port := quiet_ports())}"
        api = f"{upstream}/v1"
        settings = {
            "DATA_DIR": str(folder / "data"),
            "WEBUI_AUTH": "False",
            "WEBUI_SECRET_KEY": secrets.token_hex(16),
            "ENABLE_OLLAMA_API": "False",
            "OPENAI_API_BASE_URLS": "",
            "ENABLE_OPENAI_API": "True",
            "AUDIO_STT_ENGINE": "openai",
            "AUDIO_STT_OPENAI_API_BASE_URL": api,
            "AUDIO_STT_OPENAI_API_KEY": "none",
            "AUDIO_STT_MODEL": "whisper",
            "AUDIO_TTS_ENGINE": "openai",
            "AUDIO_TTS_OPENAI_API_BASE_URL": api,
            "AUDIO_TTS_OPENAI_API_KEY": "none",
            "AUDIO_TTS_MODEL": "speaker",
            "AUDIO_TTS_VOICE": "anna",
            "RAG_EMBEDDING_ENGINE": "openai",
            "RAG_OPENAI_API_BASE_URL": api,
            "RAG_OPENAI_API_KEY": "none",
            "RAG_EMBEDDING_MODEL": "embedder",
            "HF_HUB_OFFLINE": "1",
            "OFFLINE_MODE": "True",
            "ENABLE_VERSION_UPDATE_CHECK": "False",
            "ANONYMIZED_TELEMETRY": "False",
            "DO_NOT_TRACK": "True",
            "SCARF_NO_ANALYTICS": "True",
            **further,
        }
        self.log_path = folder / "open-webui.log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [program, "serve", "--host", "127.0.0.1", "--port", str(port)],
                cwd=folder,
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def connect_ollama(self, *urls: str) -> None:
        """Have these as connections of the other kind, as its page of connections does it."""
        with httpx.Client(base_url=self.url, trust_env=False, timeout=PATIENCE_MS / 1000) as client:
            token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
            told = {"ENABLE_OLLAMA_API": bool(urls), "OLLAMA_BASE_URLS": urls, "OLLAMA_API_CONFIGS": {}}
            headers = {"authorization": f"Bearer {token}"}
            client.post("/ollama/config/update", json=told, headers=headers).raise_for_status()

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log_path.read_text()
        try:
            return httpx.get(f"{self.url}/health", trust_env=False, timeout=2).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def webui(open_webui: Path, site: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenWebUi]:
    served = OpenWebUi(open_webui, tmp_path_factory.mktemp("open-webui"), site.url)
    try:
        wait_until(served.answers, timeout_s=300, what=f"Open WebUI serves; its log: {served.log_path}")
        yield served
    finally:
        served.process.terminate()
        served.process.wait(60)


class Visitor:
    """A person at Open WebUI, in a browser."""

    def __init__(self, page: Page, webui: OpenWebUi) -> None:
        self.page = page
        self._webui = webui

    def go(self, path: str = "/") -> None:
        self.page.goto(f"{self._webui.url}{path}")

    def begin(self, model: str) -> None:
        """A new chat."""
        self.go(f"/?models={model}")
        self.page.get_by_label(f"Selected model: {model}").first.wait_for()
        self.page.locator("#chat-input").wait_for()

    def say(self, text: str) -> None:
        self.page.locator("#chat-input").click()
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")

    def read(self, text: str) -> None:
        """Wait until it stands in the chat, and the answer is complete."""
        self.page.locator("[id^=message-]").get_by_text(text).last.wait_for()
        self.page.get_by_role("button", name="Regenerate").last.wait_for()

    def picture(self, name: str, part: Locator | None = None) -> None:
        """Of the page, or a part of it, for the documentation, with LLMUX_SCREENSHOTS=1."""
        if os.environ.get("LLMUX_SCREENSHOTS") == "1":
            self.page.mouse.move(0, 0)
            self.page.wait_for_timeout(500)  # a hint that was in the way fades
            (part or self.page).screenshot(path=IMAGES / f"open-webui-{name}.png", animations="disabled")


@pytest.fixture(scope="module")
def connected(browser: Browser, webui: OpenWebUi, site: Daemon) -> Iterator[Visitor]:
    """Somebody who has entered the connection as the README says."""
    size: ViewportSize = {"width": 1280, "height": 800}
    context = browser.new_context(viewport=size, permissions=["microphone"], reduced_motion="reduce")
    context.set_default_timeout(PATIENCE_MS)
    visitor = Visitor(context.new_page(), webui)
    visitor.go()
    visitor.page.get_by_role("button", name="Okay, Let's Go!").click()
    visitor.go("/admin/settings/connections")
    visitor.page.get_by_role("button", name="Configure").first.click()
    visitor.page.locator("#url-input").fill(f"{site.url}/v1")
    visitor.page.get_by_placeholder("API Key").fill("any")
    visitor.page.get_by_role("button", name="Advanced").click()
    visitor.page.get_by_placeholder("Enter additional headers").fill('{"X-Llmux-Load-Feedback": "true"}')
    visitor.page.locator("#provider-select").select_option("llama.cpp")
    visitor.page.locator("#provider-select").focus()  # away from the field, whose hint would be in the picture
    dialog = visitor.page.get_by_role("dialog").last
    visitor.picture("connection", dialog.locator("> div").last)
    with visitor.page.expect_response(lambda answer: "/openai/config/update" in answer.url):
        dialog.get_by_role("button", name="Save").click()
    yield visitor
    context.close()
