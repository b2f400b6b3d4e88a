"""A real Chromium on a real daemon. Whatever the page complains about in its console fails the test."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from tests.support import tiny
from tests.support.daemon import Daemon, fake, gguf, running

MEDIA_WORKER = Path(__file__).parents[2] / "support" / "fake_media_worker.py"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
]
PATIENCE_MS = 30000  # a loaded machine is slow, not wrong


def media(kind: str, mib: int, take_mib: int) -> dict[str, object]:
    cmd = [sys.executable, "-I", "-S", str(MEDIA_WORKER), "${port}", str(take_mib), "${model}"]
    return {"runtime": "command", "cmd": cmd, "type": kind, "vram_mib": mib}


@pytest.fixture(scope="module")  # not longer: its event loop is in the way of tests with loops of their own
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs chromium (on Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """No keys; a bit of everything on one device, on which `large` and the rest don't fit together."""
    config = {
        "devices": [{"kind": "host", "budget_mib": 480, "margin_mib": 20}],
        "models": {
            "tiny-chat": gguf(tiny.model(name="tiny-chat")),
            "qwen-small": fake("--take-mib", "60", vram_mib=110),
            "qwen-large": fake("--take-mib", "90", vram_mib=420),
            "slow": fake("--chunk-delay", "0.5", "--chunks", "600", vram_mib=20),
            "whisper": media("asr", 70, 30),
            "kokoro": media("tts", 45, 20),
            "painter": media("image", 100, 40),
            "embedder": media("embedding", 40, 10),
            "broken": fake("--exit-code", "1", "--log-text", "CUDA error: out of memory", vram_mib=50),
        },
        "virtual_models": {"assistant": {"model": "tiny-chat", "description": "Thinks before it answers"}},
    }
    with running(tmp_path_factory.mktemp("ui"), config) as daemon:
        yield daemon


Open = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens the dashboard in a profile of its own: `open_page(daemon, "playground/chat", width=360)`."""
    contexts = []
    complaints: list[str] = []

    def note(text: str) -> None:
        if not text.startswith("Failed to load resource"):  # the API's errors, which the page shows itself
            complaints.append(text)

    def missing(url: str) -> None:
        if "/ui/" in url:
            complaints.append(f"not served: {url}")

    def go(
        daemon: Daemon, path: str = "", *, width: int = 1280, height: int = 860, theme: str = "light", routes=()
    ) -> Page:
        size: ViewportSize = {"width": width, "height": height}
        context = browser.new_context(
            viewport=size, color_scheme=theme, reduced_motion="reduce", permissions=["microphone", "clipboard-read"]
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(f"exception: {error}"))
        page.on("console", lambda message: note(message.text) if message.type == "error" else None)
        page.on("response", lambda answer: missing(answer.url) if answer.status >= 400 else None)
        for pattern, answer in routes:
            page.route(pattern, answer)
        page.goto(f"{daemon.url}/ui/#/{path}")
        page.locator(".link:not(.connecting), dialog[open]").first.wait_for()
        return page

    yield go
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def screenshot() -> Callable[[Page, str], None]:
    """Writes the README's pictures, when LLMUX_SCREENSHOTS=1."""

    def take(page: Page, name: str) -> None:
        if os.environ.get("LLMUX_SCREENSHOTS") == "1":
            folder = Path(__file__).parents[3] / "docs" / "images"
            folder.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=folder / f"dashboard-{name}.png", animations="disabled")

    return take
