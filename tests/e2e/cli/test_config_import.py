"""Configurations of other programs: what they become, what is told, and that the result is valid.

The whole files in tests/golden/importers are compared with what stands beside them (LLMUX_GOLDEN=update writes it anew).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from supervisor.catalog import load
from supervisor.catalog.keys import Scope, load_keys
from supervisor.cli.importers.draft import Draft
from supervisor.errors import ConfigError
from tests.support import shell, tiny
from tests.support.daemon import REPOSITORY, gguf, running
from tests.support.importing import notes, swap
from tests.support.limits import LIMIT_S
from tests.support.shell import environment

FIXTURES = Path(__file__).parents[2] / "golden" / "importers"
SOURCES = {
    "llama-swap": ["llama-swap.yaml"],
    "presets": ["presets.ini"],
    "llm-pool": ["settings.json", "local.json"],
    "model-boss": ["manifest.yaml"],  # with the tasks.yaml beside it
    "first-llmux": ["models.yaml"],
}


def llmux(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    return shell.llmux(*map(str, words), env=os.environ | env, timeout=LIMIT_S)


class TestWholeFiles:
    """Realistic files of each kind become what stands beside them, and it is valid."""

    @pytest.mark.parametrize("name", SOURCES)
    def test_golden(self, name, tmp_path):
        out = tmp_path / "llmux.yaml"
        files = [FIXTURES / file for file in SOURCES[name]]
        told = llmux("config", "import", *files, "-o", out, HOME_SWAP_KEY="secret-in-the-environment")
        assert told.returncode == 0, told.stderr
        assert told.stdout == ""
        written = {"yaml": out.read_text(), "report": told.stderr.replace(str(out), "OUT")}
        for kind, text in written.items():
            golden = FIXTURES / f"{name}.expected.{kind}"
            if os.environ.get("LLMUX_GOLDEN") == "update":
                golden.write_text(text)
            assert golden.read_text() == text
        load(out, check_files=False)

    def test_a_dash_is_standard_output(self, tmp_path):
        told = shell.llmux("config", "import", str(FIXTURES / "models.yaml"), "-o", "-", cwd=tmp_path)
        assert told.stdout == llmux("config", "import", FIXTURES / "models.yaml").stdout != ""
        assert list(tmp_path.iterdir()) == []

    def test_no_secret_comes_along(self):
        for golden in FIXTURES.glob("*.expected.*"):
            assert "secret" not in golden.read_text()

    def test_the_first_llmux_with_its_keys(self, tmp_path):
        """Nine models and sixteen names; clients keep their keys; only files are missing, and each says how to get it."""
        out = tmp_path / "llmux.yaml"
        told = llmux("config", "import", FIXTURES / "models.yaml", FIXTURES / "api_keys.yaml", "-o", out, "--json")
        about = json.loads(told.stdout)
        assert (len(about["models"]), len(about["virtual_models"])) == (9, 16)
        assert about["keys"] == ["Open WebUI", "Remote Whisper clients", "OpenCode"]
        assert not [note for note in about["notes"] if note["lost"]]
        keys = out.with_name("api_keys.yaml")
        assert keys.stat().st_mode & 0o777 == 0o600
        found = load_keys(keys).authenticate("sk-llmux-whisper-0123456789", 0.0)
        assert found is not None
        assert (found.name, found.scopes) == ("Remote Whisper clients", {Scope.INFERENCE})
        checked = llmux("config", "check", out, XDG_DATA_HOME=str(tmp_path))
        assert checked.returncode == 1
        problems = checked.stdout.partition("What is missing on this machine")[2].splitlines()[1:]
        assert len(problems) == 10
        assert all("there is no such" in problem for problem in problems)
        assert sum("get it: llmux pull " in problem for problem in problems) == 8
        assert "is there already" in llmux("config", "import", FIXTURES / "models.yaml", "-o", out).stderr

    def test_beside_the_keys_of_the_first_llmux(self, tmp_path):
        """In its own folder: its file of keys stays, and the new one is named."""
        for name in ("models.yaml", "api_keys.yaml"):
            (tmp_path / name).write_text((FIXTURES / name).read_text())
        out = tmp_path / "llmux.yaml"
        told = llmux("config", "import", tmp_path / "models.yaml", "-o", out)
        assert (told.returncode, "stays as it is" in told.stderr) == (0, True)
        catalog = load(out, check_files=False)
        assert catalog.server.api_keys == tmp_path / "llmux_keys.yaml"
        assert len(load_keys(catalog.server.api_keys).keys) == 3
        assert (tmp_path / "api_keys.yaml").read_text() == (FIXTURES / "api_keys.yaml").read_text()

    def test_passes_the_check_where_the_files_are(self, tmp_path):
        """Real model files and a program that is there: `llmux config check` has nothing to say."""
        (tmp_path / "m").symlink_to(tiny.model().parent)
        binary = tmp_path / "llama-server"
        binary.write_text("#!/bin/sh\n")
        binary.chmod(0o755)
        model = tiny.model().name
        source = tmp_path / "config.yaml"
        source.write_text(
            f"macros: {{bin: {binary}}}\n"
            f'models:\n  a: {{cmd: "${{bin}} --port ${{PORT}} -m {tmp_path}/m/{model} -c 2048 --no-warmup"}}\n'
            f'  b: {{cmd: "{binary} --port ${{PORT}} -hf x/y", aliases: [c]}}\n'
        )
        out = tmp_path / "new" / "llmux.yaml"
        assert llmux("config", "import", source, "-o", out).returncode == 0
        checked = llmux("config", "check", out)
        assert (checked.returncode, checked.stderr) == (0, "")


class TestCommand:
    """Files that aren't there, formats, outputs."""

    def test_as_json(self):
        told = llmux("config", "import", FIXTURES / "presets.ini", "--json")
        answer = json.loads(told.stdout)
        assert answer["models"][:2] == ["qwen3-8b", "gemma-vision"]
        assert {"where", "message", "lost"} == set(answer["notes"][0])
        assert answer["text"].startswith("# Imported from presets.ini")

    def test_variables_of_llm_pool(self, tmp_path):
        variables = {"LLM_POOL_SETTINGS_PATH": str(FIXTURES / "settings.json")}
        text = llmux("config", "import", **variables).stdout
        assert "port: 8200" in text, "local.json beside it is merged over it"
        other = tmp_path / "other.json"
        other.write_text('{"service": {"port": 8300}}')
        assert "port: 8300" in llmux("config", "import", LLM_POOL_LOCAL_SETTINGS_PATH=str(other), **variables).stdout

    def test_what_goes_over_a_named_file(self, tmp_path):
        """As llm-pool does: what the variable names, else local.json beside it; not where both are named."""
        settings, other = FIXTURES / "settings.json", tmp_path / "other.json"
        other.write_text('{"service": {"port": 8300}}')
        assert "port: 8200" in llmux("config", "import", settings).stdout
        variable = {"LLM_POOL_LOCAL_SETTINGS_PATH": str(other)}
        assert "port: 8300" in llmux("config", "import", settings, **variable).stdout
        assert "port: 8200" in llmux("config", "import", settings, FIXTURES / "local.json", **variable).stdout

    def test_models_of_llm_pool_that_are_not_enabled(self, tmp_path):
        """They can be loaded as there, unless this machine lacks what they take: no daemon would start with such a one."""
        (tmp_path / "here.gguf").symlink_to(tiny.model())
        (tmp_path / "broken.gguf").write_bytes(b"no model")
        models = {
            name: {"backend": "llama_server", "model_path": f"{name}.gguf", "enabled": False, "enable_thinking": False}
            for name in ("here", "gone", "broken")
        }
        models["here"]["enable_thinking"] = True
        refused = "/" + "x" * 300  # by the system, as what another user owns
        models["eyes"] = {**models["here"], "llama_server_mmproj_path": refused}
        models["served"] = {"backend": "vllm_serve", "vllm_model": refused, "enabled": False}
        settings, out = tmp_path / "settings.json", tmp_path / "llmux.yaml"
        settings.write_text(json.dumps({"engine": {"models": models}}))
        told = llmux("config", "import", settings, "-o", out)
        assert told.returncode == 0, told.stderr
        written = yaml.safe_load(out.read_text())
        assert {name: model.get("enabled", True) for name, model in written["models"].items()} == {
            "here": True,
            "gone": False,
            "broken": False,
            "eyes": False,
            "served": False,
        }
        assert "engine.models.here.enabled: it isn't loaded at the start" in told.stderr
        for name in ("gone", "broken"):
            (note,) = [line for line in told.stderr.splitlines() if f"models.{name}.enabled" in line]
            assert "it stays off" in note
            assert f"path: {tmp_path}/{name}.gguf" in note
        assert told.stderr.count(f"{refused}: File name too long") == 1
        assert told.stderr.count(f"{refused} can't be read: File name too long") == 1
        checked = llmux("config", "check", out)
        assert (checked.returncode, checked.stderr) == (0, "")

    @pytest.mark.parametrize("variable", ["LLM_POOL_SETTINGS_PATH", "LLM_POOL_LOCAL_SETTINGS_PATH"])
    def test_a_variable_that_names_no_file(self, tmp_path, variable):
        there = {"LLM_POOL_SETTINGS_PATH": str(FIXTURES / "settings.json")}
        told = llmux("config", "import", **(there | {variable: str(tmp_path / "nothing.json")}))
        assert (told.returncode, told.stdout) == (2, "")
        assert f"{variable}: {tmp_path}/nothing.json: there is no such file" in told.stderr

    def test_does_not_overwrite(self, tmp_path):
        out = tmp_path / "llmux.yaml"
        out.write_text("models: {}\n")
        told = llmux("config", "import", FIXTURES / "presets.ini", "-o", out)
        assert told.returncode == 1
        assert "is there already" in told.stderr
        assert out.read_text() == "models: {}\n"

    @pytest.mark.parametrize(
        ("name", "text", "problem"),
        [
            ("a.yaml", "models: [", "not valid YAML"),
            ("a.yaml", "modles: {}", "there are no models"),
            ("a.yaml", 'models: {a: {cmd: "x ${nope} ${env.NOT_SET_ANYWHERE}"}}', "there is no macro nope"),
            ("a.yaml", 'models: {a: {cmd: "x \'y"}}', "No closing quotation"),
            ("a.yaml", "models: {a: {cmd: x, proxy: 'http://h:abc'}}", "models.a.proxy: http://h:abc is no URL"),
            ("a.yaml", "models: {a: {proxy: x}}", "models.a.cmd: is missing"),
            ("a.ini", "[a]\nwhat is this\n", "line 2: neither"),
            ("a.ini", "version = 1\n", "there are no models"),
            ("a.json", "{", "no valid JSON"),
            ("a.json", "{}", "engine.models: there are no models"),
            ("gone.ini", None, "gone.ini: there is no such file"),
        ],
    )
    def test_files_with_mistakes(self, tmp_path, name, text, problem):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        told = llmux("config", "import", path)
        assert told.returncode == 2
        assert problem in told.stderr
        assert str(path) in told.stderr
        assert "Traceback" not in told.stderr


class TestPeers:
    """Other servers' models, which llama-swap passes requests to."""

    def peers(self, **peers: Any) -> Draft:
        return swap({"local": {"cmd": "x --port ${PORT}"}}, macros={"k": "${env.K}", "plain": "sk-plain"}, peers=peers)

    def test_what_becomes_of_one(self):
        draft = self.peers(box={"proxy": "http://10.0.0.2/x/", "apiKey": "${env.BOX}", "models": ["big"]})
        assert draft.models["box/big"] == {
            "runtime": "openai_remote",
            "base_url": "http://10.0.0.2/x/v1",
            "api_key_env": "BOX",
            "allow_remote": True,
            "upstream_model": "big",
            "public": True,
        }
        assert draft.virtual_models["big"] == {"model": "box/big"}

    @pytest.mark.parametrize(
        ("peer", "key", "variable"),
        [
            ("box", "${env.BOX}", "BOX"),
            ("box", "${k}", "K"),
            ("my-box.2", "sk-literal", "MY_BOX_2_API_KEY"),
            ("2nd", "${plain}", "PEER_2ND_API_KEY"),
            ("box", "Bearer ${env.BOX}", "BOX_API_KEY"),
        ],
    )
    def test_keys_stay_where_they_are(self, peer, key, variable):
        draft = self.peers(**{peer: {"proxy": "http://10.0.0.2", "apiKey": key, "models": ["big"]}})
        assert draft.models[f"{peer}/big"]["api_key_env"] == variable
        assert "sk-" not in draft.text(()) + str(notes(draft))
        assert any(f"environment, as {variable}" in note for note in notes(draft)) == (
            not key.startswith("${") or "plain" in key
        )

    def test_a_name_that_two_have_is_nobodys(self):
        one = {"proxy": "http://10.0.0.2", "models": ["big", "local", "only"]}
        draft = self.peers(a=one, b={"proxy": "http://10.0.0.3", "models": ["big"]})
        assert set(draft.models) == {"local", "a/big", "a/local", "a/only", "b/big"}
        assert set(draft.virtual_models) == {"only"}

    def test_what_is_set_for_one_of_its_models_is_no_other_models(self):
        rules = {"setParams": {"n": 1, "model": "x"}, "setParamsByID": {"second": {"top_p": 0.5}}}
        draft = self.peers(a={"proxy": "http://10.0.0.2", "models": ["first", "second"], "filters": rules})
        assert draft.virtual_models == {
            "first": {"model": "a/first", "force": {"n": 1}},
            "a/first": {"model": "a/first", "force": {"n": 1}},
            "second": {"model": "a/second", "force": {"n": 1, "top_p": 0.5}},
            "a/second": {"model": "a/second", "force": {"n": 1, "top_p": 0.5}},
        }
        assert sum("decides who answers" in note for note in notes(draft)) == 1

    def test_peers_alone(self):
        assert set(swap({}, peers={"a": {"proxy": "http://10.0.0.2", "models": ["big"]}}).models) == {"a/big"}

    def test_answers_come_from_there(self, tmp_path):
        """One llmux as the peer of another, by what was imported."""

        def folder(name: str) -> Path:
            (tmp_path / name).mkdir()
            return tmp_path / name

        with running(folder("peer"), {"models": {"quick": gguf()}}) as peer:
            (tmp_path / "swap.yaml").write_text(f"peers: {{box: {{proxy: '{peer.url}', models: [quick]}}}}\n")
            written = llmux("config", "import", tmp_path / "swap.yaml")
            assert written.returncode == 0, written.stderr
            with running(folder("daemon"), yaml.safe_load(written.stdout)) as daemon:
                for name in ("box/quick", "quick"):
                    answer = daemon.chat(name).json()
                    assert answer["choices"][0]["message"]["content"].endswith(tiny.ANSWER)

    def test_credentials_in_the_address(self):
        draft = self.peers(a={"proxy": "http://me:sk-secret@10.0.0.2", "models": ["big"]})
        assert set(draft.models) == {"local"}
        assert "sk-secret" not in draft.text(()) + str(notes(draft))
        assert any("credentials" in note for note in notes(draft))

    @pytest.mark.parametrize(
        "peer", ["x", {"models": ["a"]}, {"proxy": "http://h"}, {"proxy": "http://h", "models": []}]
    )
    def test_what_llama_swap_refuses(self, peer):
        with pytest.raises(ConfigError, match=r"peers\.a: expected"):
            self.peers(a=peer)


class TestServedAsTheyAre:
    """`serve` takes the settings that llm-pool's variables name, unless there is a configuration of its own."""

    def test_serve_and_reload(self, tmp_path):
        settings = tmp_path / "settings.json"
        pool = {"one": {"backend": "llama_server", "model_path": str(tiny.model())}}
        settings.write_text(json.dumps({"engine": {"models": pool}}))
        env = environment(tmp_path, LLM_POOL_SETTINGS_PATH=str(settings))
        command = [sys.executable, "-m", "supervisor.cli", "serve", "--json", "--port", "0", "--log-format", "json"]
        with (
            (tmp_path / "log").open("wb") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=REPOSITORY, env=env) as serving,
        ):
            try:
                assert serving.stdout is not None
                greeting = json.loads(serving.stdout.readline())
                assert greeting["models"] == ["one"]
                told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
                (imported,) = [event for event in told if event["event"] == "configuration.imported"]
                assert imported["files"] == [str(settings)]
                for query, count in (("", 0), ("?loaded=0", 1)):  # as llm-pool lists them: those that are loaded
                    listed = httpx.get(f"{greeting['url']}/v1/models{query}", timeout=LIMIT_S).json()
                    assert len(listed["data"]) == count
                local = {"engine": {"models": {"two": {"backend": "llama_server", "model_path": str(tiny.model())}}}}
                (tmp_path / "local.json").write_text(json.dumps(local))
                answer = httpx.post(f"{greeting['url']}/v1/admin/reload", timeout=LIMIT_S).json()
                assert (answer["added"], answer["unchanged"]) == (["two"], 1)
                settings.write_text("{")
                refused = httpx.post(f"{greeting['url']}/v1/admin/reload", timeout=LIMIT_S)
                assert refused.status_code == 400
            finally:
                serving.terminate()
            assert serving.wait(LIMIT_S) == 0
