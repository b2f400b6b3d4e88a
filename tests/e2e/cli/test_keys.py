"""`llmux keys`."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from supervisor.cli.exit_codes import ExitCode
from tests.support.daemon import fake, running, wait_until
from tests.support.shell import Shell

FILE = """\
# who may come in
keys:
  # the chat server
  - name: webui
    key: sk-webui-0123456789
    scopes: [inference]  # not admin

  # the operators
  - name: ops
    key_sha256: 1111111111111111111111111111111111111111111111111111111111111111
    scopes:
      - admin
      - metrics
  # the last one
  - {name: old, key: sk-old-0123456789, expires: 2020-01-31}
"""


class TestKeys:
    """`keys add`, `list`, `revoke` on a file with comments."""

    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "api_keys.yaml"
        path.write_text(FILE)
        return path

    def test_list(self, alone, path):
        shown = alone("keys", "list", "--file", str(path)).stdout
        assert "sk-" not in shown
        assert "1111" not in shown
        rows = {line.split()[0]: line for line in shown.splitlines()[1:]}
        assert "admin, metrics" in rows["ops"]
        assert rows["webui"].endswith("valid")
        assert "2020-01-31" in rows["old"]
        assert rows["old"].endswith("expired")
        data = json.loads(alone("keys", "list", "--file", str(path), "--json").stdout)["data"]
        assert [entry["name"] for entry in data] == ["webui", "ops", "old"]

    def test_list_of_nothing(self, alone):
        none = alone("keys", "list")
        assert (none.returncode, none.stdout) == (ExitCode.DONE, "")
        assert "llmux keys add" in none.stderr

    def test_limits(self, alone, path):
        given = ("--requests-per-minute", "60", "--tokens-per-minute", "50000", "--concurrency", "4")
        done = alone("keys", "add", "phone", *given, "--file", str(path))
        assert done.returncode == ExitCode.DONE, done.stderr
        entry = yaml.safe_load(path.read_text())["keys"][-1]
        assert [entry[key] for key in ("request_rate", "token_rate", "concurrency")] == ["60/min", "50000/min", 4]
        shown = alone("keys", "list", "--file", str(path)).stdout
        rows = {line.split()[0]: line for line in shown.splitlines()[1:]}
        assert "60/min requests, 50000/min tokens, 4 at once" in rows["phone"]
        assert "none" in rows["webui"]
        (listed,) = json.loads(alone("keys", "list", "--file", str(path), "--json").stdout)["data"][-1:]
        assert (listed["request_rate"], listed["token_rate"], listed["concurrency"]) == ("60/min", "50000/min", 4)
        refused = alone("keys", "add", "other", "--requests-per-minute", "0", "--file", str(path))
        assert refused.returncode == ExitCode.USAGE

    @pytest.mark.parametrize("name", ["webui", "ops", "old"])
    def test_revoke_keeps_the_rest_as_it_is(self, alone, path, name):
        done = alone("keys", "revoke", name, "--file", str(path))
        assert (done.returncode, done.stdout) == (ExitCode.DONE, "")
        left = path.read_text()
        entries = yaml.safe_load(FILE)["keys"]
        assert yaml.safe_load(left)["keys"] == [entry for entry in entries if entry["name"] != name]
        assert set(left.splitlines()) < set(FILE.splitlines())
        for comment in ("# who may come in", "# the chat server", "# the operators", "# the last one"):
            assert comment in left
        assert path.stat().st_mode & 0o777 == 0o600

    def test_revoke_all(self, alone, path):
        for name in ("ops", "webui", "old"):
            done = alone("keys", "revoke", name, "--file", str(path))
            assert done.returncode == ExitCode.DONE, done.stderr
        assert "last key" in done.stderr
        assert alone("keys", "list", "--file", str(path)).stdout == ""
        assert alone("keys", "add", "new", "--file", str(path)).returncode == ExitCode.DONE

    def test_revoke_in_a_list_of_one_line(self, alone, path):
        path.write_text("[{name: a, key: sk-a-0123456789abc}, {name: b, key: sk-b-0123456789abc}]  # both\n")
        done = alone("keys", "revoke", "a", "--file", str(path), "--json")
        assert json.loads(done.stdout)["left"] == ["b"]
        assert "comments are lost" in done.stderr
        assert [entry["name"] for entry in yaml.safe_load(path.read_text())] == ["b"]

    def test_revoke_unknown(self, alone, path):
        told = alone("keys", "revoke", "webiu", "--file", str(path))
        assert told.returncode == ExitCode.NOT_FOUND
        assert "'webui'" in told.stderr
        assert path.read_text() == FILE
        assert alone("keys", "revoke", "a").returncode == ExitCode.NOT_FOUND

    @pytest.mark.parametrize(
        "words", [("",), ("a\nb",), ("x" * 101,), ("a", "--expires", "never"), ("a", "--scope", "root")]
    )
    def test_names_and_dates_that_are_none(self, alone, path, words):
        told = alone("keys", "add", *words, "--file", str(path))
        assert (told.returncode, told.stdout) == (ExitCode.USAGE, "")
        assert "sk-llmux" not in told.stderr
        assert path.read_text() == FILE

    def test_a_key_whose_streams_tell_of_loads(self, alone, path):
        told = alone("keys", "add", "told", "--load-feedback", "--file", str(path))
        assert told.returncode == ExitCode.DONE
        entries = yaml.safe_load(path.read_text())["keys"]
        assert [entry.get("load_feedback", False) for entry in entries] == [False, False, False, True]
        shown = alone("keys", "list", "--file", str(path)).stdout.splitlines()[1:]
        assert ["yes" in line.split() for line in shown] == [False, False, False, True]
        data = json.loads(alone("keys", "list", "--file", str(path), "--json").stdout)["data"]
        assert [entry["load_feedback"] for entry in data] == [None, None, None, True]

    def test_a_key_of_llm_pools(self, alone, path):
        assert alone("keys", "add", "pool", "--responses", "llm-pool", "--file", str(path)).returncode == ExitCode.DONE
        assert yaml.safe_load(path.read_text())["keys"][-1]["responses"] == "llm-pool"
        data = json.loads(alone("keys", "list", "--file", str(path), "--json").stdout)["data"]
        assert [entry["responses"] for entry in data] == [None, None, None, "llm-pool"]

    def test_a_key_with_a_priority_for_a_gateway(self, alone, path):
        options = ("--priority", "LOW", "--priority-ceiling", "50", "--tenant", "chat", "--for-others")
        assert alone("keys", "add", "gate", *options, "--file", str(path)).returncode == ExitCode.DONE
        entry = yaml.safe_load(path.read_text())["keys"][-1]
        assert (
            entry.items() >= {"priority": "low", "priority_ceiling": 50, "tenant": "chat", "for_others": True}.items()
        )
        shown = alone("keys", "list", "--file", str(path)).stdout.splitlines()
        assert "80, at most 50" in shown[-1]
        assert "others too, else chat" in shown[-1]
        data = json.loads(alone("keys", "list", "--file", str(path), "--json").stdout)["data"]
        assert (data[0]["priority"], data[0]["tenant"], data[-1]["priority"]) == (None, "webui", 80)

    @pytest.mark.parametrize(
        "options",
        [
            ("--priority", "urgent"),
            ("--priority-ceiling", "101"),
            ("--priority", "high", "--priority-ceiling", "normal"),
            ("--tenant", "x" * 65),
            ("--tenant", ""),
        ],
    )
    def test_a_demand_that_is_none(self, alone, path, options):
        told = alone("keys", "add", "odd", *options, "--file", str(path))
        assert (told.returncode, told.stdout, path.read_text()) == (ExitCode.USAGE, "", FILE)
        assert options[0] in told.stderr

    @pytest.mark.parametrize("expires", ["2020-01-31", "2020-01-31T12:00:00+02:00", "0001-01-01"])
    def test_one_that_would_never_work(self, alone, path, expires):
        told = alone("keys", "add", "late", "--expires", expires, "--file", str(path))
        assert (told.returncode, told.stdout) == (ExitCode.USAGE, "")
        assert f"{expires} is over already, so the key would never work" in told.stderr
        assert path.read_text() == FILE

    def test_one_that_replaces_another_is_its_heir(self, alone, path):
        before = {entry["name"]: entry for entry in self.listed(alone, path)}
        refused = alone("keys", "add", "webui", "--file", str(path))
        assert refused.returncode == ExitCode.FAILED
        assert "--replaces" in refused.stderr
        assert alone("keys", "add", "new", "--replaces", "--file", str(path)).returncode == ExitCode.FAILED
        assert path.read_text() == FILE
        for name in ("webui", "ops", "old"):
            words = ("--expires", "2090-01-31") if name == "old" else ()
            done = alone("keys", "add", name, "--replaces", *words, "--file", str(path))
            assert done.returncode == ExitCode.DONE, done.stderr
            assert f"Replaced {name} in" in done.stderr
        after = {entry["name"]: entry for entry in self.listed(alone, path)}
        assert after.pop("old") == before.pop("old") | {"expires": "2090-01-31T00:00:00+00:00", "state": "valid"}
        assert after == before
        assert "sk-webui" not in path.read_text()
        assert "1" * 30 not in path.read_text()
        assert "# who may come in" in path.read_text()

    def test_the_heir_of_an_expired_one_would_be_dead_as_well(self, alone, path):
        refused = alone("keys", "add", "old", "--replaces", "--file", str(path))
        assert (refused.returncode, refused.stdout) == (ExitCode.FAILED, "")
        assert "--expires" in refused.stderr
        assert path.read_text() == FILE

    def listed(self, alone, path):
        return json.loads(alone("keys", "list", "--file", str(path), "--json").stdout)["data"]

    def test_the_old_name_of_add(self, alone, path):
        assert alone("keys", "new", "a", "--file", str(path)).returncode == ExitCode.DONE
        assert " new" not in alone("keys", "--help").stdout
        made = json.loads(alone("keys", "add", "b", "--file", str(path), "--json").stdout)
        assert made["key"].startswith("sk-llmux-")
        assert made["key"] not in path.read_text()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with running(tmp_path_factory.mktemp("served"), {"models": {"a": fake()}}) as daemon:
        yield daemon


class TestTheFirstKey:
    """Who makes the first key isn't locked out: it opens administration, and commands on this machine need none."""

    def test_it_opens_administration_and_the_others_do_not(self, served, tmp_path):
        # Commands that find no key on this machine are as those of another machine.
        here, elsewhere = {"XDG_RUNTIME_DIR": str(served.folder)}, {"XDG_RUNTIME_DIR": str(tmp_path)}
        shell = Shell(tmp_path, served.url)

        def made(name: str, *words: str) -> tuple[str, str]:
            done = shell("keys", "add", name, *words, "--file", str(served.folder / "api_keys.yaml"))
            assert done.returncode == ExitCode.DONE, done.stderr
            return done.stdout.strip(), done.stderr

        first, told = made("me")
        assert "It is the first key, so it has the scopes inference and admin" in told
        assert shell("reload", **elsewhere).returncode == ExitCode.DONE, "without keys anybody here may"
        assert shell("ps", **elsewhere).returncode == ExitCode.REFUSED
        assert shell("ps", **elsewhere, LLMUX_API_KEY=first).returncode == ExitCode.DONE
        for command in (["ps"], ["reload"], ["chat", "a", "Hello"]):
            done = shell(*command, **here)
            assert done.returncode == ExitCode.DONE, (command, done.stderr)
        client, told = made("client")
        metrics, _ = made("prometheus", "--scope", "metrics")
        assert "admin" not in told
        assert shell("reload", **here).returncode == ExitCode.DONE
        assert shell("ps", **elsewhere, LLMUX_API_KEY=client).returncode == ExitCode.REFUSED
        chat = shell("chat", "a", "Hello", **elsewhere, LLMUX_API_KEY=client)
        assert chat.returncode == ExitCode.DONE, "inference is enough to chat"
        refused = shell("chat", "a", "Hello", **elsewhere, LLMUX_API_KEY=metrics)
        assert refused.returncode == ExitCode.REFUSED
        assert "does not have the scope 'inference'" in refused.stderr
        assert "llmux keys add NAME --scope inference" in refused.stderr

    def test_without_admin_it_is_warned_of(self, alone, tmp_path):
        path = tmp_path / "keys.yaml"
        told = alone("keys", "add", "client", "--scope", "inference", "--file", str(path))
        assert told.returncode == ExitCode.DONE
        assert "No key has the scope admin" in told.stderr
        assert yaml.safe_load(path.read_text())[0]["scopes"] == ["inference"]
        add = ("keys", "add", "client", "--replaces", "--file", str(path), "--scope")
        assert "No key has the scope admin" not in alone(*add, "admin").stderr
        assert "No key has the scope admin" in alone(*add, "inference").stderr, "the replaced key is gone"

    def test_what_is_offered_on_this_machine_is_for_its_user_alone(self, served, tmp_path):
        (path,) = (served.folder / "llmux").glob("*.json")
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        offered = json.loads(path.read_text())
        assert (offered["pid"], offered["url"]) == (served.process.pid, served.url)
        other = Shell(tmp_path)
        reload = other("reload", "--pid", str(served.process.pid), XDG_RUNTIME_DIR=str(served.folder))
        assert reload.returncode == ExitCode.DONE
        gone = other("reload", "--pid", "1", XDG_RUNTIME_DIR=str(served.folder))
        assert gone.returncode == ExitCode.UNREACHABLE

    def test_it_is_offered_again_after_the_user_logged_out_and_in(self, served):
        (path,) = (served.folder / "llmux").glob("*.json")
        offered = path.read_text()
        shutil.rmtree(path.parent)
        wait_until(path.exists)
        wait_until(lambda: path.read_text() == offered, what="the same key is offered")
