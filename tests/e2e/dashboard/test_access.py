"""The dashboard for everybody: screen readers, keyboards, low contrast, high contrast, any key that somebody types."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.e2e.dashboard.conftest import KEY, row, segment
from tests.support.daemon import Daemon

PAGES = [
    "",
    "models/broken/why",
    "models/kokoro/log",
    "models/tiny-chat/about",
    "models/tiny-chat/load",
    "requests",
    "playground/chat",
    "playground/speech",
    "playground/transcription",
    "playground/images",
    "playground/embeddings",
    "decisions",
    "connect",
    "daemon",
]


RULES = {"light": {}, "dark": {"runOnly": ["color-contrast"]}}
"""What axe-core looks at: a theme changes nothing but the colours."""


def violations(page: Page, where: str) -> list[str]:
    """What axe-core is sure of in either theme, and names where none may be, of which it is never sure."""
    found = []
    for theme, rules in RULES.items():
        page.emulate_media(color_scheme=theme)
        told = Axe().run(page, options=rules).response
        wrong = told["violations"] + [each for each in told["incomplete"] if each["id"] == "aria-prohibited-attr"]
        found += [f"{where}, {theme}: {each['id']}: {node['html'][:120]}" for each in wrong for node in each["nodes"]]
    return found


@pytest.fixture
def used(empty: Daemon) -> Daemon:
    """Something of everything: loaded, failed, decided, and requests that ended well or not."""
    for name in ["kokoro", "broken"]:
        empty.post(f"/v1/admin/models/{name}/load")
    assert [empty.chat(name).status_code for name in ["assistant", "no-such-model"]] == [200, 404]
    return empty


class TestAxe:
    """axe-core finds nothing to complain of, in both themes."""

    def test_on_any_page(self, used, clients, locked, open_page):
        page, found = open_page(used), []
        for path in PAGES:
            page.evaluate("path => (location.hash = `#/${path}`)", path)
            page.locator("dialog .tabs" if path.startswith("models/") else "main .panel").first.wait_for()
            found += violations(page, path)
        page.evaluate("location.hash = '#/requests'")
        page.locator(".ended-table").get_by_role("link", name="assistant").first.click()
        page.get_by_role("dialog").get_by_text("Try it again").wait_for()
        found += violations(page, "a request")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)  # else the next key is for the one that closes
        page.keyboard.press("?")
        page.get_by_role("dialog", name="Keyboard shortcuts").wait_for()
        found += violations(page, "help")
        page.keyboard.press("Escape")
        page.evaluate("location.hash = '#/playground/embeddings'")
        page.get_by_role("button", name="Compare").click()
        page.locator(".similarity").wait_for()
        found += violations(page, "compared")
        page.evaluate("location.hash = '#/models/single/why'")
        clients.begin("single", 5)
        page.get_by_role("dialog").get_by_role("button", name="Unload").click()
        page.get_by_role("dialog", name="Unload single").wait_for()
        found += violations(page, "a question over a drawer")
        page.keyboard.press("Escape")
        page.evaluate("location.hash = '#/'")
        page.get_by_role("button", name="4 queued for single").first.click()
        found += violations(page, "unfolded")
        page.get_by_role("button", name="Cancel all 4").click()
        page.get_by_role("dialog", name="Cancel 4 requests").wait_for()
        found += violations(page, "another question")
        asked = open_page(locked)
        asked.get_by_role("dialog", name="API key").wait_for()
        found += violations(asked, "key")
        assert found == []

    def test_with_many_models_and_warnings(self, crowd, open_page):
        page = open_page(crowd)
        page.get_by_role("list", name="Memory warnings").wait_for()
        assert violations(page, "many") == []


class TestFocus:
    """A keyboard reaches everything, and comes back to where it was."""

    def test_returns_when_a_drawer_closes(self, used, open_page):
        page = open_page(used, "decisions")
        link = page.locator(".decisions").get_by_role("link", name="kokoro").first
        link.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog", name="kokoro")).to_be_visible()
        expect(page.locator("nav [aria-current=page]").first).to_have_text("Decisions")
        page.get_by_role("dialog").get_by_role("link", name="About").click()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(link).to_be_focused()

    def test_every_model_is_a_stop_of_the_tabulator(self, used, open_page):
        page = open_page(used)
        rows = page.locator("tr[data-model]")
        rows.first.wait_for()
        reachable = "rows => rows.filter(row => row.querySelector('th a').tabIndex === 0).length"
        assert rows.evaluate_all(reachable) == rows.count() == len(used.config["models"])

    def test_stays_with_a_row_that_moves(self, empty, open_page):
        page = open_page(empty)
        link = row(page, "whisper").get_by_role("link")
        link.focus()
        page.keyboard.press("l")
        expect(row(page, "whisper")).to_contain_text("ready")
        assert page.locator("tr[data-model]").first.get_attribute("data-model") == "whisper"
        expect(link).to_be_focused()


class TestKeyDialog:
    """Without a key nothing works, so the question for it can't be lost."""

    def test_escape_does_not_lose_it(self, locked, open_page):
        page = open_page(locked)
        prompt = page.get_by_role("dialog", name="API key")
        for _ in range(3):  # a browser lets a page refuse the first one only
            page.keyboard.press("Escape")
        prompt.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        expect(row(page, "plain")).to_be_visible()
        expect(page.get_by_role("main")).to_be_focused()

    @pytest.mark.parametrize("odd", ["ключ-от-админа", "sk-llmux-“quoted”", "sk llmux"])
    def test_says_what_is_wrong_with_a_key_that_can_not_be_sent(self, locked, open_page, odd):
        page = open_page(locked)
        prompt = page.get_by_role("dialog", name="API key")
        prompt.get_by_label("Key", exact=True).fill(odd)
        page.keyboard.press("Enter")
        letter = next(letter for letter in odd if not "!" <= letter <= "~")
        expect(prompt.get_by_role("alert")).to_contain_text(f"No key has the character “{letter}”")
        prompt.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        expect(row(page, "plain")).to_be_visible()


class TestColours:
    """What colours say can be told apart."""

    def test_memory_is_seen_in_high_contrast(self, used, open_page):
        page = open_page(used, forced_colors="active")
        segment(page, "kokoro").wait_for()
        seen = page.evaluate(
            """() => ['.segment[data-model]', '.segment[data-model] i', '.bar']
                .map(place => getComputedStyle(document.querySelector(place)).backgroundColor)"""
        )
        assert len(set(seen)) == 3, seen

    def test_no_two_loaded_models_look_alike(self, crowd, open_page):
        """Also once others were unloaded, which keep their colours in the charts."""
        page = open_page(crowd)
        segments = page.locator(".segment[data-model]")
        colours = "parts => new Set(parts.map(part => getComputedStyle(part.querySelector('i')).backgroundColor)).size"
        expect(segments).to_have_count(12)
        assert segments.evaluate_all(colours) == 12
        expect(page.locator(".chart.whole figcaption")).to_contain_text("model-0")
        for n in range(12):
            crowd.post(f"/v1/admin/models/model-{n}/unload").raise_for_status()
            crowd.post(f"/v1/admin/models/model-{n + 12}/load").raise_for_status()
        for n in range(12, 24):
            segment(page, f"model-{n}").wait_for()
        expect(segments).to_have_count(12)
        assert segments.evaluate_all(colours) == 12
