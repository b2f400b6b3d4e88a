"""A real Chromium on a real daemon. Whatever the page complains about in its console fails the test."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, ViewportSize, expect, sync_playwright

from tests.support import tiny
from tests.support.daemon import Daemon, fake, gguf, running, wait_until

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
KEY = "sk-llmux-dashboard-tests-0123456789"

expect.set_options(timeout=PATIENCE_MS)


def row(page: Page, model: str) -> Locator:
    return page.locator(f'tr[data-model="{model}"]')


def segment(page: Page, model: str) -> Locator:
    return page.locator(f'.segment[data-model="{model}"]')


def media(kind: str, mib: int, take_mib: int) -> dict[str, object]:
    return fake("--media", "--take-mib", str(take_mib), "--log-text", "${model} speaks", type=kind, vram_mib=mib)


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
        "limits": {"crash_limit": 1},
        "models": {
            "tiny-chat": gguf(tiny.model(name="tiny-chat")),
            "qwen-small": fake("--take-mib", "60", vram_mib=110),
            "qwen-large": fake("--take-mib", "90", vram_mib=420),
            "slow": fake("--chunk-delay", "0.5", "--chunks", "600", vram_mib=30),
            "single": fake("--chunk-delay", "0.5", "--chunks", "600", vram_mib=30, target_inflight=1, drain_s=1),
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


@pytest.fixture
def empty(site: Daemon) -> Daemon:
    """The shared daemon with nothing loaded."""
    for view in site.get("/v1/admin/models").json()["data"]:
        if view["worker"]:
            site.post(f"/v1/admin/models/{view['name']}/unload", params={"force": "true"})
    wait_until(lambda: not site.get("/health").json()["models_loaded"])
    return site


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "api_keys.yaml").write_text(f"- {{name: me, key: {KEY}, scopes: [admin, inference]}}\n")
    (folder / "api_keys.yaml").chmod(0o600)
    with running(folder, {"models": {"plain": fake()}}) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A hundred models of several types, the first twelve of them loaded. The memory of two can't be right."""
    types = ["llm", "llm", "tts", "asr", "embedding"]
    models = {f"model-{n}": fake(vram_mib=60, type=types[n % 5]) for n in range(100)}
    models |= {"model-98": fake(vram_mib=5000), "model-99": gguf(tiny.model(name="tiny-chat"), vram_mib=4)}
    limits = {"loads_per_device": 12}
    with running(tmp_path_factory.mktemp("crowd"), {"models": models, "limits": limits}) as daemon:
        for n in range(12):
            daemon.post("/models/load", json={"model": f"model-{n}"}).raise_for_status()
        wait_until(lambda: len(daemon.get("/health").json()["models_loaded"]) == 12)
        yield daemon


class Clients:
    """Chat requests in threads, and what became of them."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.threads: list[threading.Thread] = []
        self.ends: list[str] = []

    def begin(self, model: str, count: int) -> None:
        """Return once the daemon has them all."""
        for _ in range(count):
            self.threads.append(threading.Thread(target=self._ask, args=(model,)))
            self.threads[-1].start()
        wait_until(lambda: len(self._daemon.get("/v1/admin/requests").json()["data"]) == len(self.threads))

    def _ask(self, model: str) -> None:
        try:
            self.ends.append(self._daemon.chat(model, stream=True).text)
        except httpx.RemoteProtocolError as error:
            self.ends.append(f"cut: {error}")

    def join(self) -> None:
        """Cancel what is left, and wait."""
        with self._daemon.client() as client:
            for request in client.get("/v1/admin/requests").json()["data"]:
                client.delete(f"/v1/admin/requests/{request['id']}")
        for thread in self.threads:
            thread.join()


@pytest.fixture
def clients(empty: Daemon) -> Iterator[Clients]:
    made = Clients(empty)
    with contextlib.ExitStack() as stack:
        stack.callback(made.join)
        yield made


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
        daemon: Daemon,
        path: str = "",
        *,
        width: int = 1280,
        height: int = 860,
        theme: str = "light",
        routes=(),
        forced_colors: str = "none",
    ) -> Page:
        size: ViewportSize = {"width": width, "height": height}
        context = browser.new_context(
            viewport=size,
            color_scheme=theme,
            forced_colors=forced_colors,
            reduced_motion="reduce",
            permissions=["microphone", "clipboard-read"],
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
