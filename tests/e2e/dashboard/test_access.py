"""The dashboard for everybody: screen readers, keyboards, low contrast, high contrast, any key that somebody types."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.e2e.dashboard.conftest import KEY, emptied, row, segment, violations, visit
from tests.support.daemon import Daemon, wait_until

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
            visit(page, path)
            page.locator("dialog .tabs" if path.startswith("models/") else "main .panel").first.wait_for()
            found += violations(page, path)
        page.get_by_role("link", name="Requests", exact=True).click()
        page.locator(".ended-table").get_by_role("link", name="assistant").first.click()
        page.get_by_role("dialog").get_by_text("Try it again").wait_for()
        found += violations(page, "a request")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)  # else the next key is for the one that closes
        page.keyboard.press("?")
        page.get_by_role("dialog", name="Keyboard shortcuts").wait_for()
        found += violations(page, "help")
        page.keyboard.press("Escape")
        visit(page, "playground/embeddings")
        page.get_by_role("button", name="Compare").click()
        page.locator(".similarity").wait_for()
        found += violations(page, "compared")
        visit(page, "models/single/why")
        clients.begin("single", 5)
        page.get_by_role("dialog").get_by_role("button", name="Unload").click()
        page.get_by_role("dialog", name="Unload single").wait_for()
        found += violations(page, "a question over a drawer")
        page.keyboard.press("Escape")
        visit(page, "")
        page.get_by_role("button", name="4 queued for single").first.click()
        found += violations(page, "unfolded")
        page.get_by_role("button", name="Cancel all 4").click()
        page.get_by_role("dialog", name="Cancel 4 requests").wait_for()
        found += violations(page, "another question")
        page.goto(f"{locked.url}/ui/")
        page.get_by_role("dialog", name="API key").wait_for()
        found += violations(page, "key")
        assert found == []


class TestUse:
    """A keyboard reaches everything, and comes back to where it was; what colours say is seen in high contrast."""

    def test_by_keyboard_and_in_high_contrast(self, used, open_page):
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

        visit(page, "")
        rows = page.locator("tr[data-model]")
        rows.first.wait_for()
        reachable = "rows => rows.filter(row => row.querySelector('th a').tabIndex === 0).length"
        assert rows.evaluate_all(reachable) == rows.count() == len(used.config["models"])
        page.emulate_media(forced_colors="active")
        segment(page, "kokoro").wait_for()
        seen = page.evaluate(
            """() => ['.segment[data-model]', '.segment[data-model] i', '.bar']
                .map(place => getComputedStyle(document.querySelector(place)).backgroundColor)"""
        )
        assert len(set(seen)) == 3, seen
        page.emulate_media(forced_colors="none")

        emptied(used)
        expect(page.locator(".segment[data-model]")).to_have_count(0)
        link = row(page, "whisper").get_by_role("link")
        link.focus()
        page.keyboard.press("l")
        expect(row(page, "whisper")).to_contain_text("ready")
        assert rows.first.get_attribute("data-model") == "whisper"
        expect(link).to_be_focused()


WRONG = "sk-llmux-not-this-one-0123456789"
ASK_LATE = """async () => {
    const load = (name) => import(new URL(`js/${name}.js`, document.baseURI));
    const [{ get }, { state }] = await Promise.all([load("api"), load("state")]);
    get("/v1/admin/models?late").catch((error) => (window.late = [error.status, state.link]));
}"""


class TestKey:
    """Where keys are configured nothing works without one: the page asks for it, once, and the question can't be lost."""

    def test_is_asked_for_once(self, locked, open_page):
        page = open_page(locked)
        prompt = page.get_by_role("dialog", name="API key")

        def enter(key: str, remember: bool = False) -> None:
            prompt.get_by_label("Key", exact=True).fill(key)
            prompt.get_by_label("Remember").set_checked(remember)
            page.keyboard.press("Enter")

        for _ in range(3):  # a browser lets a page refuse the first one only
            page.keyboard.press("Escape")
        for odd in ["ключ-от-админа", "sk-llmux-“quoted”", "sk llmux"]:
            enter(odd)
            letter = next(letter for letter in odd if not "!" <= letter <= "~")
            expect(prompt.get_by_role("alert")).to_contain_text(f"No key has the character “{letter}”")
        enter(WRONG)
        expect(prompt.get_by_role("alert")).to_contain_text("not known")
        for remember, kept in [(False, [None, KEY]), (True, [KEY, None])]:
            enter(KEY, remember)
            expect(prompt).to_have_count(0)
            expect(row(page, "plain")).to_be_visible()
            expect(page.get_by_role("main")).to_be_focused()
            stored = "[localStorage, sessionStorage].map(store => store.getItem('llmux.key'))"
            assert page.evaluate(stored) == kept
            page.reload()
            expect(row(page, "plain")).to_be_visible()
            expect(prompt).to_have_count(0)
            page.get_by_role("link", name="Connect").click()
            expect(page.get_by_label("curl", exact=True)).not_to_contain_text(KEY)
            page.get_by_role("button", name="Forget the key").click()
            expect(prompt).to_be_visible()
            visit(page, "")

    def test_a_late_refusal_of_the_last_one_asks_for_none(self, locked, open_page):
        page = open_page(locked)
        prompt = page.get_by_role("dialog", name="API key")
        prompt.get_by_label("Key", exact=True).fill(WRONG)
        page.keyboard.press("Enter")
        expect(prompt.get_by_role("alert")).to_contain_text("not known")
        asked = []
        page.route("**/v1/admin/models?late", lambda route: asked.append(route))  # it wants a function in Python
        with page.expect_request("**/v1/admin/models?late"):
            page.evaluate(ASK_LATE)
        prompt.get_by_label("Key", exact=True).fill(KEY)
        prompt.get_by_role("button", name="Continue").click()
        expect(row(page, "plain")).to_be_visible()
        wait_until(lambda: page.evaluate("true") and asked)
        asked[0].continue_()
        wait_until(lambda: page.evaluate("window.late") is not None)
        assert page.evaluate("window.late") == [401, "live"]
