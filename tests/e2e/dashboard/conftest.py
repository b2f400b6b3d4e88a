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
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    WebError,
    expect,
    sync_playwright,
)

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
    "--disable-site-isolation-trials",
    "--renderer-process-limit=1",
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


def visit(page: Page, path: str) -> None:
    """Another page of the dashboard, without loading anew."""
    page.evaluate("path => (location.hash = `#/${path}`)", path)


def wait_fit(page: Page, *widths: int) -> None:
    """Until nothing has to be scrolled sideways, at each width; charts follow the page's width a moment later."""
    for width in widths:
        page.set_viewport_size({"width": width, "height": 860})
        fits = "document.documentElement.scrollWidth <= innerWidth"
        wait_until(lambda: page.evaluate(fits), what=f"{page.url} fits {width} pixels")


@pytest.fixture(scope="package")  # not longer: its event loop is in the way of tests with loops of their own
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs chromium (on Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="package")
def profile(browser: Browser) -> BrowserContext:
    """One with one tab that stays: a new one costs twice as much as another page in it."""
    context = browser.new_context(reduced_motion="reduce", permissions=["microphone", "clipboard-read"])
    context.set_default_timeout(PATIENCE_MS)
    context.new_page()
    return context


@pytest.fixture(scope="package")
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


def emptied(daemon: Daemon, key: str | None = None) -> Daemon:
    """With nothing loaded."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with daemon.client(headers=headers) as client:
        for view in client.get("/v1/admin/models").json()["data"]:
            if view["worker"]:
                client.post(f"/v1/admin/models/{view['name']}/unload", params={"force": "true"})
        wait_until(lambda: not client.get("/health").json()["models_loaded"])
    return daemon


@pytest.fixture
def empty(site: Daemon) -> Daemon:
    """The shared daemon with nothing loaded."""
    return emptied(site)


@pytest.fixture(scope="package")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "api_keys.yaml").write_text(f"- {{name: me, key: {KEY}, scopes: [admin, inference]}}\n")
    (folder / "api_keys.yaml").chmod(0o600)
    with running(folder, {"models": {"plain": fake()}}) as daemon:
        yield daemon


class Clients:
    """Chat requests in threads."""

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

    def join(self) -> list[str]:
        """Cancel what is left, wait, and tell what became of them."""
        with self._daemon.client() as client:
            for request in client.get("/v1/admin/requests").json()["data"]:
                client.delete(f"/v1/admin/requests/{request['id']}")
        for thread in self.threads:
            thread.join()
        ends = self.ends
        self.threads, self.ends = [], []
        return ends


@pytest.fixture
def clients(empty: Daemon) -> Iterator[Clients]:
    made = Clients(empty)
    with contextlib.ExitStack() as stack:
        stack.callback(made.join)
        yield made


Open = Callable[..., Page]


@pytest.fixture
def open_page(profile: BrowserContext) -> Iterator[Open]:
    """Opens the dashboard, with nothing stored: `open_page(daemon, "playground/chat", width=360)`."""
    complaints: list[str] = []
    kept = profile.pages[0]
    tabs = [kept]

    def note(message: ConsoleMessage) -> None:
        is_of_api = message.text.startswith("Failed to load resource") and "/ui/" not in message.location["url"]
        if message.type == "error" and not is_of_api:  # the API's errors are shown by the page itself
            complaints.append(f"{message.text} {message.location['url']}")

    def fail(error: WebError) -> None:
        complaints.append(f"exception: {error.error}")

    def go(
        daemon: Daemon, path: str = "", *, width: int = 1280, height: int = 860, theme: str = "light", routes=()
    ) -> Page:
        page = tabs.pop() if tabs else profile.new_page()
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=theme, forced_colors="none")
        for pattern, answer in routes:
            page.route(pattern, answer)
        page.goto(f"{daemon.url}/ui/#/{path}")
        page.locator(".link:not(.connecting), dialog[open]").first.wait_for()
        return page

    profile.on("console", note)
    profile.on("weberror", fail)
    yield go
    for page in profile.pages:
        page.unroute_all()
        if page.url.startswith("http"):
            page.evaluate("localStorage.clear(), sessionStorage.clear()")
        page.mouse.move(0, 0)
        page.goto("about:blank") if page is kept else page.close()
    profile.remove_listener("console", note)
    profile.remove_listener("weberror", fail)
    assert complaints == []


AXE = "options => axe.run(options).then(({ violations, incomplete }) => ({ violations, incomplete }))"
RULES = {"light": {}, "dark": {"runOnly": ["color-contrast"]}}
"""What axe-core looks at: a theme changes nothing but the colours."""


def violations(page: Page, where: str) -> list[str]:
    """What axe-core is sure of in either theme, and names where none may be, of which it is never sure."""
    found = []
    if page.evaluate("!window.axe"):
        page.evaluate(AXE_SCRIPT)
    for theme, rules in RULES.items():
        page.emulate_media(color_scheme=theme)
        told = page.evaluate(AXE, {"resultTypes": ["violations", "incomplete"], **rules})
        wrong = told["violations"] + [each for each in told["incomplete"] if each["id"] == "aria-prohibited-attr"]
        found += [f"{where}, {theme}: {each['id']}: {node['html'][:120]}" for each in wrong for node in each["nodes"]]
    return found


@pytest.fixture
def screenshot() -> Callable[[Page, str], None]:
    """Writes the README's pictures, when LLMUX_SCREENSHOTS=1."""

    def take(page: Page, name: str) -> None:
        if os.environ.get("LLMUX_SCREENSHOTS") == "1":
            folder = Path(__file__).parents[3] / "docs" / "images"
            folder.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=folder / f"dashboard-{name}.png", animations="disabled")

    return take
