"""The configuration is edited in a real browser: a model's settings, and the text; from another machine with a key."""

from __future__ import annotations

import pytest
import yaml
from playwright.sync_api import Page, Route, expect

from tests.e2e.dashboard.conftest import emptied, row, visit, wait_fit
from tests.support import tiny
from tests.support.daemon import Daemon, fake, gguf, running, wait_until
from tests.support.fake_hub import Hub, Repo

EDITOR, LOOKER = (f"sk-test-{name}-{'0' * 16}" for name in ("editor", "looker"))
AS_EDITOR = {"authorization": f"Bearer {EDITOR}"}
TEXT = "The configuration as YAML"


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Two keys: one may edit, one may not."""
    folder = tmp_path_factory.mktemp("editing")
    entries = [
        {"name": "editor", "key": EDITOR, "scopes": ["inference", "admin", "configure"]},
        {"name": "looker", "key": LOOKER, "scopes": ["inference", "admin"]},
    ]
    (folder / "api_keys.yaml").write_text(yaml.safe_dump(entries))
    (folder / "api_keys.yaml").chmod(0o600)
    config = {
        "devices": [{"kind": "host", "budget_mib": 1000, "margin_mib": 0}],
        "models": {"chat": gguf(), "large": fake("--take-mib", "10", vram_mib=960)},
    }
    with running(folder, config) as daemon:
        daemon.config_path.write_text(f"# mine\n{daemon.config_path.read_text()}")
        yield daemon


@pytest.fixture
def home(started):
    """The shared daemon with nothing loaded; its configuration is as before after the test."""
    good = started.config_path.read_text()
    yield emptied(started, EDITOR)
    started.config_path.write_text(good)
    assert started.post("/v1/admin/reload", headers=AS_EDITOR).status_code == 200


def opened(open_page, daemon: Daemon, path: str, key: str = EDITOR, **more: object) -> Page:
    page = open_page(daemon, path, **more)
    page.get_by_role("textbox", name="Key").fill(key)
    page.get_by_role("button", name="Continue").click()
    return page


def entry(daemon: Daemon, name: str) -> dict:
    return yaml.safe_load(daemon.config_path.read_text())["models"][name]


class TestSettings:
    """The gear of a model."""

    def test_are_saved_with_what_they_mean_in_sight(self, home, open_page):
        page = opened(open_page, home, "", width=390, theme="dark")
        row(page, "chat").get_by_label("Settings of chat").click()
        dialog = page.get_by_role("dialog")
        context, save = dialog.get_by_label("Context, in tokens"), dialog.get_by_role("button", name="Save")
        expect(dialog.locator(".fit")).to_contain_text("evicts nothing")
        expect(save).to_be_disabled()
        dialog.get_by_label("Slots").fill("0")
        expect(page.locator(".settings-form")).to_contain_text("expected at least 1, got 0")
        expect(save).to_be_disabled()
        dialog.get_by_label("Slots").fill("")
        context.fill("100000000")
        expect(page.locator(".fit.refused")).to_contain_text("does not fit")

        context.fill("4096")
        dialog.get_by_label("Further names").fill("gpt-4, helper")
        dialog.get_by_text("What is written").click()
        expect(dialog.locator(".diff")).to_contain_text("n_ctx: 4096")
        wait_fit(page, 1280, 390)
        save.click()
        expect(page.locator(".notice")).to_contain_text("chat is saved.")
        assert entry(home, "chat")["n_ctx"] == 4096
        assert home.config_path.read_text().startswith("# mine\n")
        expect(row(page, "chat")).to_contain_text("gpt-4, helper")
        wait_fit(page, 390, 1280)
        expect(page.get_by_role("group", name="Set")).to_have_count(0)  # there are none

    def test_once_leaves_the_file_alone_and_says_who_would_go(self, home, open_page):
        home.post("/v1/admin/models/large/load", headers=AS_EDITOR).raise_for_status()
        page = opened(open_page, home, "models/chat/settings")
        expect(page.locator(".fit")).to_contain_text("evicts large")
        page.get_by_label("Context, in tokens").fill("1024")
        page.get_by_role("button", name="Load once").click()
        expect(page.get_by_role("dialog")).to_contain_text("ready")
        assert entry(home, "chat")["n_ctx"] == 2048

    def test_somebody_was_faster(self, home, open_page):
        page = opened(open_page, home, "models/chat/settings")
        page.get_by_label("Context, in tokens").fill("4096")
        expect(page.get_by_role("button", name="Save")).to_be_enabled()
        home.config_path.write_text(theirs := home.config_path.read_text() + "# theirs\n")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("alert")).to_contain_text("has changed since you read it")
        assert home.config_path.read_text() == theirs
        with page.expect_response("**/v1/admin/config/models/chat"):  # which the page reads by itself
            home.post("/v1/admin/reload", headers={"authorization": f"Bearer {EDITOR}"}).raise_for_status()
        expect(page.get_by_role("button", name="Save")).to_be_disabled()

        def while_it_reads(route: Route) -> None:
            expect(page.get_by_role("button", name="Save")).to_be_disabled()
            route.continue_()

        page.route("**/v1/admin/config/models/chat", while_it_reads, times=1)  # it reads once more when it has saved
        page.get_by_role("button", name="Read it again").click()
        expect(page.get_by_label("Context, in tokens")).to_have_value("4096")
        page.get_by_role("button", name="Save").click()
        expect(page.locator(".notice")).to_contain_text("saved")
        assert (entry(home, "chat")["n_ctx"], home.config_path.read_text()[-9:]) == (4096, "# theirs\n")

    def test_where_the_file_is_read_only_the_lines_are_there_to_copy(self, tmp_path, open_page):
        config = {"models": {"chat": gguf(tiny.model(name="tiny-chat"))}, "server": {"edit": "none"}}
        with running(tmp_path, config) as daemon:
            page = open_page(daemon, "models/chat/settings")
            expect(page.locator(".settings-form")).to_contain_text("Nothing can be saved here: server.edit is none.")
            page.get_by_label("Context, in tokens").fill("4096")
            expect(page.get_by_label("lines to enter", exact=True)).to_have_text("    n_ctx: 4096")
            expect(page.get_by_role("button", name="Save")).to_be_disabled()
            visit(page, "configuration")
            page.get_by_label(TEXT).fill(f"{daemon.config_path.read_text()}# more\n")
            page.get_by_role("button", name="Copy the text").click()
            assert page.evaluate("navigator.clipboard.readText()").endswith("# more\n")


class TestModels:
    """Added and taken out."""

    def test_by_a_name_of_the_hub_to_an_answer_and_away(self, tmp_path, open_page):
        model = tiny.model(name="tiny-chat").read_bytes()
        with Hub() as hub:
            files = {
                "tiny-chat-Q4_K_M.gguf": model,
                "tiny-chat-Q8_0.gguf": model + bytes(1 << 20),
                "tiny-chat-BF16.gguf": model + bytes(100 << 20),
            }
            hub.repos["acme/Tiny-Chat-GGUF"] = Repo(files, large=frozenset(files))
            config = {
                "devices": [{"kind": "host", "budget_mib": 150, "margin_mib": 0}],
                "models": {"worker": fake()},
                "server": {"models_dir": str(tmp_path / "models")},
            }
            variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
            with running(tmp_path, config, env=variables) as daemon:
                page = open_page(daemon, width=390)
                page.get_by_role("button", name="Add a model").click()
                dialog = page.get_by_role("dialog")
                dialog.get_by_role("textbox").fill("acme/Tiny-Chat-GGUF")
                page.keyboard.press("Enter")
                expect(dialog.get_by_role("radio", name="Q4_K_M")).to_be_checked()
                expect(dialog.get_by_role("radio", name="BF16")).to_be_disabled()
                wait_fit(page, 390)
                dialog.get_by_role("radio", name="Q8_0").check()
                dialog.get_by_label("Name for clients").fill("mine")
                dialog.get_by_role("button", name="Add", exact=True).click()
                dialog.get_by_role("button", name="Load mine").click()
                expect(row(page, "mine")).to_contain_text("ready")
                wait_fit(page, 390, 1280)
                assert daemon.chat("mine").json()["choices"][0]["message"]["content"] == tiny.ANSWER
                visit(page, "models/mine/settings")
                page.get_by_role("button", name="Take out…").click()
                page.get_by_label("Delete its files, too: 1 file").check()
                page.get_by_role("button", name="Take out", exact=True).click()
                expect(row(page, "mine")).to_have_count(0)
                assert list((tmp_path / "models").rglob("*.gguf")) == []

    def test_what_is_not_there(self, home, open_page):
        page = opened(open_page, home, "")
        page.get_by_role("button", name="Add a model").click()
        page.get_by_role("dialog").get_by_role("textbox").fill("/nowhere/at/all")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("there is no such file or folder")


class TestText:
    """The page with the whole file."""

    def test_is_checked_compared_saved_and_taken_back(self, home, open_page):
        page = opened(open_page, home, "configuration", width=390)
        area = page.get_by_label(TEXT)
        expect(area).to_have_value(before := home.config_path.read_text())
        area.fill(before.replace("vram_mib: 960", "vram_mbi: 960"))
        line = before.splitlines().index("    vram_mib: 960") + 1
        expect(page.get_by_label("Mistakes")).to_contain_text(
            f"line {line} models.large.vram_mbi unknown key; did you mean"
        )
        expect(page.locator(".gutter .wrong")).to_have_text(str(line))
        page.get_by_role("button", name=f"line {line}").click()
        assert area.evaluate("area => area.value.slice(area.selectionStart, area.selectionEnd)") == "    vram_mbi: 960"
        area.fill(before.replace("- -I", "- -B"))
        expect(page.get_by_role("alert")).to_have_text("Read-only here: models.large.cmd.")
        expect(page.get_by_role("button", name="Save")).to_be_disabled()
        area.fill(after := before.replace("vram_mib: 960", "vram_mib: 970  # more"))
        expect(page.locator(".diff .added")).to_have_text("+    vram_mib: 970  # more\n")
        page.get_by_role("button", name="Save").click()
        expect(page.locator(".notice")).to_contain_text("saved, and in force")
        assert home.config_path.read_text() == after
        page.get_by_label("Go back to").select_option(index=1)
        expect(area).to_have_value(before)
        page.get_by_role("button", name="Save").click()
        wait_until(lambda: home.config_path.read_text() == before)
        wait_fit(page, 390, 1280)

    def test_a_draft_survives_another_page_and_somebody_else(self, home, open_page):
        page = opened(open_page, home, "configuration")
        area = page.get_by_label(TEXT)
        expect(area).to_have_value(before := home.config_path.read_text())
        area.fill(f"{before}# my draft\n")
        page.get_by_role("link", name="Overview").click()
        home.config_path.write_text(f"{before}# theirs\n")
        page.get_by_role("link", name="Configuration").click()
        expect(area).to_have_value(f"{before}# my draft\n")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("alert")).to_contain_text("has changed since you read it")
        page.get_by_role("button", name="Read it again").click()
        expect(page.locator(".diff .removed")).to_have_text("-# theirs\n")
        expect(page.locator(".diff .added")).to_have_text("+# my draft\n")


class TestScope:
    """Who may not edit is told which key would, and may load a model otherwise once."""

    def test_a_load_is_left(self, home, open_page):
        page = opened(open_page, home, "configuration", LOOKER)
        expect(page.get_by_role("main")).to_contain_text("--scope configure")
        expect(page.get_by_label(TEXT)).to_have_count(0)
        page.get_by_role("link", name="Overview").click()
        page.get_by_role("button", name="Add a model").click()
        expect(page.get_by_role("dialog")).to_contain_text("--scope configure")
        page.keyboard.press("Escape")
        visit(page, "models/chat/settings")
        expect(page.locator(".settings-form")).to_contain_text(
            "llmux keys add me --scope inference --scope admin --scope configure"
        )
        expect(page.get_by_role("button", name="Save")).to_be_disabled()
        page.get_by_label("Context, in tokens").fill("1024")
        page.get_by_role("button", name="Load once").click()
        expect(page.get_by_role("dialog")).to_contain_text("ready")
