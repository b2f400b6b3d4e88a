"""Edits of the configuration's file through the API: checked, guarded, saved, reloaded, taken back."""

from __future__ import annotations

import contextlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.support.daemon import Daemon, fake, gguf, running, wait_until
from tests.support.unprivileged import unprivileged

CONFIG = "/v1/admin/config"
KEYS = {name: f"sk-test-{name}-{'0' * 16}" for name in ("admin", "editor", "user")}
HOSTILE = [
    {"text": "x", "model": "chat"},
    {},
    {"model": "chat", "keys": {"cmd": ["sh"]}},
    {"model": "chat", "keys": {"no\nsuch": 1}},
    {"model": "chat", "keys": [1]},
    {"model": "chat", "nonsense": 1},
    {"text": 5},
    {"text": "#" * (1 << 20) + "\n"},
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    models = {"chat": gguf(), "worker": fake("--take-mib", "10", vram_mib=100), "large": fake(vram_mib=1500)}
    config = {
        "devices": [{"kind": "host", "budget_mib": 2000, "margin_mib": 0}],
        "models": models,
        "virtual_models": {"quick": {"model": "chat", "enable_thinking": False}},
    }
    with running(tmp_path_factory.mktemp("edited"), config) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def with_keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("locked")
    entries = [
        {"name": "admin", "key": KEYS["admin"], "scopes": ["admin", "inference"]},
        {"name": "editor", "key": KEYS["editor"], "scopes": ["configure"]},
        {"name": "user", "key": KEYS["user"]},
    ]
    (folder / "api_keys.yaml").write_text(yaml.safe_dump(entries))
    (folder / "api_keys.yaml").chmod(0o600)
    with running(folder, {"models": {"worker": fake()}}) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def as_before(daemon):
    """Each test finds the file as the first one did."""
    text = daemon.config_path.read_text()
    yield
    if daemon.config_path.read_text() != text:
        daemon.config_path.write_text(text)
        daemon.post("/v1/admin/reload").raise_for_status()


def check(daemon: Daemon, **edit: object) -> dict:
    answer = daemon.post(f"{CONFIG}/check", json=edit)
    assert answer.status_code == 200, answer.text
    return answer.json()


def save(daemon: Daemon, etag: str | None = None, **edit: object):
    etag = daemon.get(CONFIG).headers["etag"] if etag is None else etag
    with daemon.client() as client:
        return client.put(CONFIG, json=edit, headers={"if-match": etag})


class TestSettings:
    """A model's settings, with what a load would mean."""

    def test_say_what_the_file_says_and_what_is_in_effect(self, daemon):
        found = daemon.get(f"{CONFIG}/models/chat").json()
        by_key = {setting["key"]: setting for setting in found["settings"]}
        assert (by_key["n_ctx"]["written"], by_key["n_ctx"]["value"]) == (2048, 2048)
        assert (by_key["priority"]["written"], by_key["priority"]["schema"]["maximum"]) == (None, 1000)
        assert not {"cmd", "binary", "env", "extra_args"} & by_key.keys()
        assert (found["names"], found["other_names"]) == ([], ["quick"])

    def test_more_context_takes_more(self, daemon):
        needs = [check(daemon, model="chat", keys={"n_ctx": n})["fit"]["rooms"][0]["need_mib"] for n in (2048, 1 << 17)]
        assert needs[0] < needs[1]

    def test_say_who_would_go(self, daemon):
        daemon.post("/v1/admin/models/large/load").raise_for_status()
        try:
            fit = check(daemon, model="worker", keys={"vram_mib": 1000})["fit"]
            assert (fit["outcome"], fit["others"]) == ("evicts", ["large"])
            assert check(daemon, model="worker", keys={"vram_mib": 400})["fit"]["outcome"] == "fits"
            refused = check(daemon, model="worker", keys={"vram_mib": 4000})["fit"]
            assert (refused["outcome"], refused["rooms"][0]["usable_mib"]) == ("refused", 2000)
        finally:
            daemon.post("/v1/admin/models/large/unload").raise_for_status()

    def test_are_written_and_in_force(self, daemon):
        before = daemon.config_path.read_text()
        saved = save(daemon, model="worker", keys={"priority": 7, "pin": True}, names=["gpt-4", "gpt-5"])
        assert saved.status_code == 200, saved.text
        assert daemon.model("worker")["priority"] == 7
        assert daemon.chat("gpt-5").status_code == 200
        text = daemon.config_path.read_text()
        assert yaml.safe_load(text)["models"]["worker"] == yaml.safe_load(before)["models"]["worker"] | {
            "priority": 7,
            "pin": True,
        }
        etag = saved.headers["etag"]
        assert save(daemon, etag, model="worker", keys={"priority": None, "pin": None}, names=[]).status_code == 200
        assert yaml.safe_load(daemon.config_path.read_text()) == yaml.safe_load(before)

    def test_a_mistake_names_its_key(self, daemon):
        (mark,) = check(daemon, model="worker", keys={"priority": 5000})["marks"]
        assert (mark["key"], mark["message"]) == ("models.worker.priority", "expected at most 1000, got 5000")
        text = daemon.config_path.read_text().replace("  chat:\n", "  chat:\n    load_mode: none\n")
        (mark,) = check(daemon, text=text)["marks"]
        assert mark["message"] == 'llmux has no key for this option; write extra_args: ["--load-mode", "none"]'
        refused = save(daemon, model="worker", keys={"priority": 5000})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_configuration")

    def test_a_taken_name(self, daemon):
        refused = daemon.post(f"{CONFIG}/check", json={"model": "worker", "names": ["quick"]})
        assert refused.json()["error"]["param"] == "names"
        assert check(daemon, model="worker", names=["a name"])["marks"][0]["key"] == "virtual_models.a name"

    def test_an_entry_that_can_not_be_edited_safely_gives_the_lines(self, daemon):
        text = (
            daemon.config_path.read_text()
            .replace("  worker:", "  worker: &worker")
            .replace("  large:", "  other: *worker\n  large:")
        )
        daemon.config_path.write_text(text)
        daemon.post("/v1/admin/reload").raise_for_status()
        refused = daemon.post(f"{CONFIG}/check", json={"model": "other", "keys": {"priority": 7}})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "configuration_not_edited")
        assert refused.json()["error"]["detail"] == ["  other:", "    priority: 7"]
        assert daemon.post(f"{CONFIG}/check", json={"model": "worker", "names": ["<<"]}).status_code == 409

    def test_what_another_file_overrules_is_noted(self, daemon):
        local = daemon.config_path.with_name("local.yaml")
        local.write_text("models:\n  worker:\n    priority: 3\n")
        try:
            assert check(daemon, model="worker", keys={"priority": 7})["notes"] == [
                f"{local}:3:5 sets priority, too, and that counts."
            ]
        finally:
            local.unlink()

    def test_of_a_model_of_a_folder(self, daemon, tmp_path):
        path = Path(gguf()["path"])
        os.link(path, tmp_path / "small-Q4_0.gguf")
        text = f"models_from: [{tmp_path}]\n{daemon.config_path.read_text()}"
        assert save(daemon, text=text).status_code == 200
        models = daemon.get("/v1/admin/models").json()["data"]
        name = next(one["name"] for one in models if str(tmp_path) in str(one["definition"].get("path")))
        assert save(daemon, model=name, keys={"n_ctx": 1024}).status_code == 200
        entry = yaml.safe_load(daemon.config_path.read_text())["models"][name]
        assert (entry["n_ctx"], entry["path"]) == (1024, str(tmp_path / "small-Q4_0.gguf"))
        assert [one["name"] for one in daemon.get("/v1/admin/models").json()["data"]].count(name) == 1


class TestText:
    """The whole file, as its owner's editor would have it."""

    def test_marks_say_where(self, daemon):
        text = daemon.get(CONFIG).json()["text"]
        checked = check(daemon, text=text.replace("vram_mib: 1500", "vram_mbi: 1500"))
        line = text.splitlines().index("    vram_mib: 1500") + 1
        assert [(mark["line"], mark["column"], mark["key"]) for mark in checked["marks"]] == [
            (line, 5, "models.large.vram_mbi")
        ]
        assert "+    vram_mbi: 1500" in checked["diff"].splitlines()

    def test_broken_yaml(self, daemon):
        (mark,) = check(daemon, text="models:\n\tx: 1\n")["marks"]
        assert (mark["line"], "a tab indents" in mark["message"]) == (2, True)

    def test_what_a_reload_would_do(self, daemon):
        text = daemon.get(CONFIG).json()["text"]
        assert check(daemon, text=text.replace("  large:", "  larger:"))["guarded"] == [
            "models.larger.runtime",
            "models.larger.cmd",
        ]
        difference = check(daemon, text=text.replace("enable_thinking: false", "enable_thinking: true"))["difference"]
        assert (difference["changed"], difference["stops"]) == (["quick"], [])

    def test_is_saved_to_the_letter(self, daemon):
        text = daemon.get(CONFIG).json()["text"] + "\n# ümläut, and no newline at the end\nlimits: {queue_total: 99}"
        daemon.config_path.chmod(0o640)
        assert save(daemon, text=text).status_code == 200
        assert daemon.config_path.read_text() == text
        assert stat.S_IMODE(daemon.config_path.stat().st_mode) == 0o640

    def test_line_ends_stay(self, daemon):
        daemon.config_path.write_bytes(daemon.config_path.read_bytes().replace(b"\n", b"\r\n"))
        text = daemon.get(CONFIG).json()["text"].replace("\r\n", "\n") + "limits: {queue_total: 99}\n"
        assert save(daemon, text=text).status_code == 200
        assert daemon.config_path.read_bytes() == text.encode().replace(b"\n", b"\r\n")

    def test_a_link_stays_one(self, daemon, tmp_path):
        real = tmp_path / "real.yaml"
        daemon.config_path.rename(real)
        daemon.config_path.symlink_to(real)
        try:
            assert save(daemon, model="worker", keys={"priority": 9}).status_code == 200
            assert daemon.config_path.is_symlink()
            assert yaml.safe_load(real.read_text())["models"]["worker"]["priority"] == 9
        finally:
            daemon.config_path.unlink()
            real.rename(daemon.config_path)

    def test_the_last_model_goes_only_by_force(self, daemon):
        text = yaml.safe_dump({**yaml.safe_load(daemon.config_path.read_text()), "models": {}, "virtual_models": {}})
        assert "no models are left" in check(daemon, text=text)["marks"][0]["message"]
        assert save(daemon, text=text, force=True).status_code == 200
        assert daemon.get("/v1/admin/models").json()["data"] == []

    def test_earlier_ones_come_back(self, daemon):
        before = daemon.config_path.read_text()
        for priority in range(1, 13):
            save(daemon, model="worker", keys={"priority": priority}).raise_for_status()
        found = wait_until(
            lambda: (view := daemon.get(CONFIG).json())["etag"][1:-1] in view["versions"][0]["id"] and view
        )
        assert len(found["versions"]) == 11
        second = daemon.get(f"{CONFIG}/versions/{found['versions'][1]['id']}").json()["text"]
        assert yaml.safe_load(second)["models"]["worker"]["priority"] == 11
        assert save(daemon, text=second).status_code == 200
        assert daemon.model("worker")["priority"] == 11
        assert daemon.get(f"{CONFIG}/versions/..%2Finstance.lock").status_code == 404
        assert before != second


class TestOthers:
    """Somebody else's change is never lost, nor is a file that can't be written."""

    def test_an_editor_was_faster(self, daemon):
        etag = daemon.get(CONFIG).headers["etag"]
        theirs = daemon.config_path.read_text() + "# theirs\n"
        daemon.config_path.write_text(theirs)
        refused = save(daemon, etag, model="worker", keys={"priority": 9})
        assert (refused.status_code, refused.json()["error"]["code"]) == (412, "configuration_changed")
        assert daemon.config_path.read_text() == theirs

    def test_of_two_at_once_one_wins(self, daemon):
        etag = daemon.get(CONFIG).headers["etag"]
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda n: save(daemon, etag, model="worker", keys={"priority": n}), range(1, 9)))
        assert sorted(answer.status_code for answer in answers) == [200] + [412] * 7
        won = next(answer for answer in answers if answer.status_code == 200)
        assert won.json()["text"] == daemon.config_path.read_text()

    def test_without_a_version(self, daemon):
        with daemon.client() as client:
            refused = client.put(CONFIG, json={"model": "worker", "keys": {"priority": 9}})
        assert (refused.status_code, refused.json()["error"]["code"]) == (428, "precondition_required")

    @pytest.mark.parametrize("edit", HOSTILE)
    def test_what_is_no_edit(self, daemon, edit):
        before = daemon.config_path.read_text()
        assert daemon.post(f"{CONFIG}/check", json=edit).status_code == 400
        assert save(daemon, **edit).status_code == 400
        assert daemon.config_path.read_text() == before

    def test_a_model_that_is_not_there(self, daemon):
        assert save(daemon, model="../x", keys={"priority": 1}).status_code == 404


class TestAccess:
    """The scope, the guard, and what switches them."""

    @pytest.fixture
    def locked(self, with_keys):
        """As it was at first for each test."""
        text = with_keys.config_path.read_text()
        yield with_keys
        if with_keys.config_path.read_text() != text:
            with_keys.config_path.write_text(text)
            self.ask(with_keys, "admin", "POST", "/v1/admin/reload").raise_for_status()

    def ask(self, daemon: Daemon, name: str, method: str = "GET", path: str = CONFIG, **more: object):
        headers = {"authorization": f"Bearer {KEYS[name]}", **more.pop("headers", {})}
        with daemon.client() as client:
            return client.request(method, path, headers=headers, **more)

    def edit(self, daemon: Daemon, text: str, **headers: str):
        etag = self.ask(daemon, "editor").headers["etag"]
        return self.ask(daemon, "editor", "PUT", json={"text": text}, headers={"if-match": etag, **headers})

    def test_another_scope_sees_nothing(self, locked):
        for method, path in [
            ("GET", CONFIG),
            ("PUT", CONFIG),
            ("POST", f"{CONFIG}/check"),
            ("GET", f"{CONFIG}/models/worker"),
            ("GET", f"{CONFIG}/versions/x"),
            ("GET", f"/{CONFIG}"),
            ("GET", f"{CONFIG}/"),
        ]:
            for name in ("admin", "user"):
                refused = self.ask(locked, name, method, path)
                assert refused.status_code in {403, 404}, (name, method, path, refused.text)
                assert "models" not in refused.text, (name, method, path)

    def test_it_opens_nothing_else(self, locked):
        assert self.ask(locked, "editor", path="/v1/admin/models").status_code == 403
        assert self.ask(locked, "editor", "POST", "/v1/admin/models/worker/load").status_code == 403

    def test_a_page_of_another_origin(self, locked):
        text = locked.config_path.read_text()
        assert self.edit(locked, text, origin="http://127.0.0.1:9").status_code == 403
        assert self.edit(locked, text, origin="https://evil.example").status_code == 403

    def test_guarded_keys_and_what_opens_them(self, locked):
        text = locked.config_path.read_text()
        guarded = text.replace("vram_mib: 100", "vram_mib: 100\n    env: {LD_PRELOAD: /tmp/evil.so}")
        refused = self.edit(locked, guarded)
        assert (refused.status_code, refused.json()["error"]["detail"]) == (403, ["models.worker.env"])
        refused = self.edit(locked, text.replace("server:", "server:\n  edit: all"))
        assert refused.json()["error"]["code"] == "configuration_guarded"
        assert locked.config_path.read_text() == text
        locked.config_path.write_text(opened := text.replace("server:", "server:\n  edit: all"))
        self.ask(locked, "admin", "POST", "/v1/admin/reload").raise_for_status()
        assert self.edit(locked, opened.replace("100", "100\n    env: {A: b}")).status_code == 200
        locked.config_path.write_text(text.replace("server:", "server:\n  edit: none"))
        self.ask(locked, "admin", "POST", "/v1/admin/reload").raise_for_status()
        refused = self.edit(locked, text)
        assert (refused.status_code, "server.edit is none" in refused.json()["error"]["message"]) == (409, True)

    def test_without_keys_all_counts_as_safe(self, tmp_path):
        with running(tmp_path, {"models": {"worker": fake()}, "server": {"edit": "all"}}) as daemon:
            found = daemon.get(CONFIG).json()
            assert found["edit"] == "safe"
            assert check(daemon, text=found["text"].replace("-I", "-B"))["guarded"] == ["models.worker.cmd"]

    def test_a_folder_that_can_not_be_written(self):
        with unprivileged({"models": {"worker": fake()}}) as daemon, contextlib.ExitStack() as ended:
            daemon.start()
            ended.callback(daemon.stop)
            text = daemon.config_path.read_text()
            daemon.folder.chmod(0o555)
            assert "Permission denied" in daemon.get(CONFIG).json()["locked"]
            refused = save(daemon, model="worker", keys={"priority": 9})
            daemon.folder.chmod(0o755)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "configuration_read_only")
            assert "+    priority: 9" in refused.json()["error"]["detail"]
            assert daemon.config_path.read_text() == text
