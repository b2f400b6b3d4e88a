from __future__ import annotations

import re

import pytest

from runtimes.registry import REGISTRY
from supervisor.catalog import find_config
from supervisor.catalog.document.document import dotted
from supervisor.catalog.loading.loader import load
from supervisor.errors import ConfigError

MINIMAL = "models:\n  tiny:\n    path: tiny.gguf\n"

EVERY_MISTAKE = """\
llmux.yaml:5:5 models.qwen.n_ctx: expected a whole number, got "8k"; write 8192
llmux.yaml:6:5 models.qwen.n_ctxt: unknown key; did you mean "n_ctx"?
llmux.yaml:7:5 models.qwen.pin: expected true or false, got "yes"; write true
llmux.yaml:8:5 models.qwen.priority: expected at most 1000, got 2000
llmux.yaml:9:5 models.qwen.layers: expected a whole number or text, got a list
llmux.yaml:10:5 models.qwen.keep_alive_s: expected more than 0 or "forever", got 0
llmux.yaml:11:5 models.qwen.vram_mib: expected a whole number, got 1.5
llmux.yaml:12:5 models.qwen.type: expected "llm", "asr", "tts", "image", "vision" or "embedding", got "lm"; did you mean "llm"?
llmux.yaml:13:11 models.qwen.env.A: expected text, got 1; quote it: "1"
llmux.yaml:14:3 models.typo: no "runtime", and nothing to tell it from (a path ending in .gguf: llama_server, a cmd: command); did you mean "path" where it says "pth"?
llmux.yaml:15:3 models.nothing: expected the keys of a model, such as "path"
llmux.yaml:16:9 models.odd.runtime: no such runtime; did you mean "llama_server"?
llmux.yaml:17:3 models. x: not a name: up to 200 visible characters without spaces, no leading slash
llmux.yaml:19:7 virtual_models.a.model: no model "qwn"; did you mean "qwen"?
llmux.yaml:20:3 virtual_models.b: the key "model" is missing
llmux.yaml:20:7 virtual_models.b.modle: unknown key; did you mean "model"?
llmux.yaml:21:7 virtual_models.c.model: "a" is itself a virtual model; refer to a model
llmux.yaml:22:27 virtual_models.d.enable_thinkin: unknown key; did you mean "enable_thinking"?
llmux.yaml:23:3 virtual_models.ok: hides the model "ok" behind another; give it a name of its own
llmux.yaml:24:7 virtual_models.e: "model" is given twice
llmux.yaml:24:32 virtual_models.e.force: "stream" can't be changed: it decides who answers, and how
llmux.yaml:25:11 devices[0]: a cuda device is given by either "index" or "uuid"
llmux.yaml:25:25 devices[1]: the host has no "index"
llmux.yaml:26:23 limits.max_loaded.lm: no model type; did you mean "llm"?
llmux.yaml:26:31 limits.queue_total: expected at least 1, got 0
llmux.yaml:26:47 limits.eviction: expected "last_resort" or "strict", got "last"
llmux.yaml:27:1 server: port 8081 lies among the workers' own
llmux.yaml:27:71 server.state_dir: the environment variable NOT_SET is not set
llmux.yaml:28:1 serve: unknown section; did you mean "server"?
local.yaml:1:15 models.ok.pin: expected true or false, got 1
"""


class TestMinimal:
    """Three lines are a configuration."""

    def test_three_lines(self, folder):
        folder.write("", "tiny.gguf")
        catalog = folder.load(MINIMAL)
        model = catalog.models["tiny"]
        assert ("llama_server", "llama_server", folder.path / "tiny.gguf") == (
            model.adapter.name,
            model.config.runtime,
            model.config.path,
        )
        assert (catalog.server.host, catalog.server.port, catalog.devices) == ("127.0.0.1", 8081, "auto")
        assert folder.path / "xdg/state/llmux" == catalog.server.state_dir
        assert folder.path / "xdg/data/llmux/runtimes" == catalog.server.runtimes_dir

    @pytest.mark.parametrize("text", ["", "models:\n", "server:\nlimits:\nmodels: {}\nx-mine: [1]\n"])
    def test_empty_sections(self, folder, text):
        assert folder.load(text).models == {}

    def test_keys_beside_the_file_are_found(self, folder):
        assert None is folder.load("models:").server.api_keys
        folder.write("[]", "api_keys.yaml")
        assert folder.path / "api_keys.yaml" == folder.load().server.api_keys


class TestProblems:
    """All problems come at once, each on a line with place, trail, expectation, what came, and what to write."""

    def test_all_at_once(self, folder):
        folder.write("models: {ok: {pin: 1}}\n", "local.yaml")
        text = """\
models:
  ok: {path: gone.gguf}
  qwen:
    path: q.gguf
    n_ctx: 8k
    n_ctxt: 1
    pin: yes
    priority: 2000
    layers: [1]
    keep_alive_s: 0
    vram_mib: 1.5
    type: lm
    env: {A: 1}
  typo: {pth: x.gguf}
  nothing:
  odd: {runtime: llama_serve, path: x}
  ' x': {cmd: x}
virtual_models:
  a: {model: qwn}
  b: {modle: qwen}
  c: {model: a}
  d: {model: ok, params: {enable_thinkin: false}}
  ok: {model: qwen}
  e: {physical: ok, model: ok, force: {stream: true}}
devices: [{kind: cuda}, {kind: host, index: 0}]
limits: {max_loaded: {lm: 1}, queue_total: 0, eviction: last}
server: {port: 8081, worker_port_first: 8000, worker_port_last: 9000, state_dir: $NOT_SET/x}
serve: 1
"""
        assert EVERY_MISTAKE.splitlines() == folder.problems(text)

    def test_folders_of_users_that_are_not_there(self, folder):
        assert folder.problems("models: {m: {path: ~nobody-here/q.gguf}}", check_files=False) == [
            "llmux.yaml:1:14 models.m.path: there is no user nobody-here"
        ]

    def test_a_file_of_keys_that_is_not_there(self, folder):
        text = "server: {api_keys: keys/gone.yaml}"
        (problem,) = folder.problems(text)
        assert problem.startswith("llmux.yaml:1:10 server.api_keys: ")
        assert problem.endswith("keys/gone.yaml: there is no such file")
        assert folder.load(text, check_files=False).server.api_keys == folder.path / "keys" / "gone.yaml"

    @pytest.mark.parametrize(("kind", "is_good"), [("llm", True), ("asr", False), ("embedding", False)])
    def test_a_probe_through_inference_where_there_is_none(self, folder, kind, is_good):
        """The stub serves chat completions alone."""
        text = f"models: {{m: {{cmd: x, type: {kind}, probe: inference}}}}"
        if is_good:
            assert folder.load(text).models["m"].config.probe == "inference"
            return
        (problem,) = folder.problems(text)
        assert problem.startswith(f"llmux.yaml:1:{text.index('probe') + 1} models.m.probe: there is no such probe")
        assert problem.endswith("llm and embedding and vision")

    @pytest.mark.parametrize(("written", "meant"), [("'4096'", "4096, without quotes"), ("8k", "8192")])
    def test_a_number_that_is_none(self, folder, written, meant):
        (problem,) = folder.problems(f"models: {{m: {{cmd: 'cat ${{port}}', vram_mib: {written}}}}}", check_files=False)
        assert problem.endswith(f"; write {meant}")

    @pytest.mark.parametrize(
        "written", ["9" * 5000, "9" * 5000 + "k", "²", "²k"], ids=["digits", "digits and k", "²", "²k"]
    )
    def test_a_number_that_nobody_means(self, folder, written):
        (problem,) = folder.problems(
            f"models: {{m: {{cmd: 'cat ${{port}}', vram_mib: '{written}'}}}}", check_files=False
        )
        assert "expected a whole number, got" in problem
        assert "; write" not in problem

    @pytest.mark.parametrize(("written", "meant"), [("'[::1]'", "::1"), ("localhost", "localhost")])
    def test_an_address_to_listen_on(self, folder, written, meant):
        assert folder.load(f"server: {{host: {written}}}").server.host == meant

    @pytest.mark.parametrize(
        ("written", "told"),
        [
            ("[127.0.0.1, '::1']", "listens on one address"),
            ("127.0.0.1 ::1", "listens on one address"),
            ("unix:/run/llmux.sock", "a proxy such as nginx or socat can offer it as a Unix socket"),
            ("/run/llmux.sock", "a proxy such as nginx or socat can offer it as a Unix socket"),
        ],
    )
    def test_an_address_that_is_none(self, folder, written, told):
        (problem,) = folder.problems(f"server: {{host: {written}}}")
        assert problem.startswith("llmux.yaml:1:10 server.host: ")
        assert told in problem

    def test_a_path_that_tells_no_runtime_is_no_misspelt_key(self, folder):
        (problem,) = folder.problems("models: {m: {path: q.bin}}")
        assert problem.endswith("(a path ending in .gguf: llama_server, a cmd: command)")

    def test_a_file_that_cannot_be_read_is_the_only_problem(self, folder):
        folder.write("virtual_models: {a: {model: tiny}}\n", "local.yaml")
        assert (folder.problems("models: {a: [1,\n2]\nb: 1")) == [
            "llmux.yaml:3:1: not valid YAML: did not find expected ',' or '}', while parsing a flow mapping"
        ]

    def test_adapter_sentences_are_placed_at_the_key_they_name(self, folder):
        found = folder.troubles("models:\n  tiny:\n    path: gone.gguf\n")
        assert [
            f"llmux.yaml:3:5 models.tiny.path: {folder.path}/gone.gguf: there is no such file",
            "llmux.yaml:2:3 models.tiny: a sentence without a key",
        ] == found
        assert "tiny" in folder.load(check_files=False).models

    def test_one_that_mends_itself_is_looked_at_again(self, folder):
        model = folder.load(MINIMAL).models["tiny"]
        assert f"path: {folder.path}/tiny.gguf: there is no such file; a sentence without a key" == model.trouble
        folder.write("", "tiny.gguf")
        assert model.refreshed().troubles == ()
        assert model.refreshed().refreshed().troubles == ()

    def test_one_whose_file_is_away_keeps_what_that_said_and_no_limit(self, folder):
        folder.write("", "tiny.gguf")
        before = folder.load(MINIMAL).models["tiny"]
        (folder.path / "tiny.gguf").unlink()
        now = folder.load(f"{MINIMAL}\nlimits: {{keep_alive: {{llm: 60}}}}").models["tiny"]
        kept = before.with_troubles_of(now)
        assert (kept.troubles, kept.config, kept.keep_alive_s) == (now.troubles, before.config, 60)

    def test_a_contradiction_in_the_text_is_a_mistake_and_a_missing_file_is_not(self, folder):
        text = "models: {m: {runtime: llama_cpp, path: gone.gguf, type_v: q8_0, flash_attn: 'off'}}"
        (problem,) = folder.problems(text, registry=REGISTRY)
        assert problem.endswith("models.m.type_v: q8_0 needs flash_attn on or auto")
        (trouble,) = folder.troubles(text.replace(", flash_attn: 'off'", ""), registry=REGISTRY)
        assert trouble.endswith("gone.gguf: there is no such file")

    def test_thinking_needs_a_switch(self, folder):
        text = "models: {m: {cmd: x, has_switch: false}}\nvirtual_models: {v: {model: m, enable_thinking: true}}"
        assert folder.problems(text) == [
            'llmux.yaml:2:18 virtual_models.v: "enable_thinking": the runtime command has no such switch for m'
        ]

    def test_device_references(self, folder):
        text = "models: {m: {cmd: x, devices: [gpu0]}}\ndevices: [{kind: host}]"
        assert folder.problems(text) == ['llmux.yaml:1:32 models.m.devices[0]: no device "gpu0"; there is: host']
        later = "models: {m: {cmd: x, devices: [gpu0]}}\ndevices: [{kind: cuda, uuid: GPU-1f}]"
        assert "m" in folder.load(later).models

    @pytest.mark.parametrize("text", ["[1]", "text", "models: [a]", "virtual_models: 3", "devices: gpu", "devices: []"])
    def test_sections_of_the_wrong_kind(self, folder, text):
        assert len(folder.problems(text)) == 1

    def test_disabled_models_are_as_if_they_were_not_there(self, folder):
        catalog = folder.load("models: {m: {path: gone.gguf, enabled: false}}\nvirtual_models: {m: {model: m}}")
        assert (catalog.models, catalog.virtual, catalog.listing()) == ({}, {}, ())

    def test_another_name_for_a_disabled_model(self, folder):
        text = "models:\n  m: {path: gone.gguf, enabled: false}\nvirtual_models:\n  v:\n    model: m\n"
        (problem,) = folder.problems(text)
        assert problem == (
            'llmux.yaml:5:5 virtual_models.v.model: the model "m" is disabled, so nothing would answer: enable it, or '
            "remove this name"
        )


class TestNothingToServe:
    """A configuration without models can be loaded and shown, and says where it has none."""

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("", "llmux.yaml: there are no models to serve: add one"),
            ("server: {port: 1}\nmodels:\n", "llmux.yaml:2:1 models: there are no models to serve: add one"),
            (
                "models:\n  m: {path: x.gguf, enabled: false}\n",
                'llmux.yaml:1:1 models: every model has "enabled: false", so there is nothing to serve: enable one',
            ),
        ],
    )
    def test_says_where(self, folder, text, told):
        assert folder.load(text).nothing_to_serve().startswith(told)

    def test_one_model_is_enough(self, folder):
        folder.write("", "a.gguf")
        assert folder.load("models: {m: {path: a.gguf}}").nothing_to_serve() is None


class TestLayers:
    """base < local.yaml < LLMUX_* < flags, key by key, and every value knows its layer."""

    def test_local_wins_per_key(self, folder):
        folder.write("models: {m: {n_ctx: 2, vram_mib: null}}\nserver: {port: 3000}", "local.yaml")
        catalog = folder.load("models: {m: {cmd: x, n_ctx: 1, vram_mib: 5}}\nserver: {port: 2000, host: localhost}")
        config = catalog.models["m"].config
        assert (config.n_ctx, config.vram_mib, config.cmd) == (2, None, "x")
        assert (catalog.server.port, catalog.server.host) == (3000, "localhost")
        assert str(catalog.origin("server", "port")) == "local.yaml:2:10"
        assert str(catalog.origin("server", "host")) == "llmux.yaml:2:22"
        assert None is catalog.origin("server", "log_level")

    def test_explicit_local(self, folder, monkeypatch):
        path = folder.write("server: {port: 3000}", "elsewhere/mine.yaml")
        monkeypatch.setenv("LLMUX_LOCAL_CONFIG", str(path))
        assert folder.load("models:").server.port == 3000

    def test_environment_beats_files_and_flags_beat_it(self, folder, monkeypatch):
        monkeypatch.setenv("LLMUX_SERVER__PORT", "4000")
        monkeypatch.setenv("LLMUX_SERVER__HOST", "10")
        monkeypatch.setenv("llmux_limits__drain_s", "2.5")
        monkeypatch.setenv("LLMUX_LIMITS__MAX_LOADED__LLM", "1")
        monkeypatch.setenv("LLMUX_SERVER__ALLOWED_HOSTS", '["a", "b"]')
        monkeypatch.setenv("LLMUX_DEVICES", "[{kind: host, budget_mib: 100}]")
        text = "server: {port: 2000}\nlimits: {max_loaded: {llm: 5, tts: 2}}"
        catalog = folder.load(text, flags={"server.log_level": "debug", "server.log_format": None})
        assert (
            catalog.server.port,
            catalog.server.host,
            catalog.server.allowed_hosts,
            catalog.server.log_level,
        ) == (4000, "10", ("a", "b"), "debug")
        assert (catalog.limits.drain_s, catalog.limits.max_loaded) == (2.5, {"llm": 1, "tts": 2})
        assert [(device.id, device.budget_mib) for device in catalog.devices] == [("host", 100)]
        table = {dotted(trail): str(place) for trail, place in catalog.origins.items()}
        assert table["server.port"] == "LLMUX_SERVER__PORT"
        assert table["devices[0].budget_mib"] == "LLMUX_DEVICES"
        assert table["server.log_level"] == "--log-level"
        assert table["limits.max_loaded.tts"] == "llmux.yaml:2:31"
        assert folder.load(flags={"server.port": 5000}).server.port == 5000

    def test_environment_problems_name_the_variable(self, folder, monkeypatch):
        monkeypatch.setenv("LLMUX_SERVER__PORT", "http")
        monkeypatch.setenv("LLMUX_SERVER__LOG_LEVL", "info")
        monkeypatch.setenv("LLMUX_SERVER_HOST", "::")
        assert sorted(
            folder.problems("models:", flags={"server.host": 1}), key=lambda line: (line[0] == "-", line)
        ) == [
            "LLMUX_SERVER_HOST: unknown variable; did you mean LLMUX_SERVER__HOST?",
            'LLMUX_SERVER__LOG_LEVL server.log_levl: unknown key; did you mean "log_level"?',
            'LLMUX_SERVER__PORT server.port: expected a whole number, got "http"',
            '--host server.host: expected text, got 1; quote it: "1"',
        ]

    def test_environment_yaml_with_mistakes(self, folder, monkeypatch):
        """Each is told once, with its variable."""
        monkeypatch.setenv("LLMUX_LIMITS__MAX_LOADED", "{")
        monkeypatch.setenv("LLMUX_SERVER__ALLOWED_HOSTS", "[a, {b")
        monkeypatch.setenv("LLMUX_DEVICES", "[{kind: hots}]")
        problems = folder.problems("models:")
        named = ("LLMUX_DEVICES", "LLMUX_LIMITS__MAX_LOADED", "LLMUX_SERVER__ALLOWED_HOSTS")
        assert sorted(re.match(r"\w+", line)[0] for line in problems) == sorted(named)
        assert sum("not valid YAML" in line for line in problems) == 2

    @pytest.mark.parametrize("runtime", ["path: q.gguf", "cmd: [x]"])
    def test_folders_of_libraries(self, folder, runtime):
        folder.write(f"models: {{m: {{{runtime}, library_path: [~/lib, lib]}}}}")
        config = folder.load(registry=REGISTRY, check_files=False).models["m"].config
        assert [folder.path / "home" / "lib", folder.path / "lib"] == config.library_path

    def test_paths_start_from_the_file_that_has_them(self, folder, monkeypatch):
        monkeypatch.setenv("MODELS", "/srv/models")
        local = folder.write("models: {m: {folders: [a, ~/b, $MODELS/c]}}\nserver: {state_dir: s}", "sub/local.yaml")
        monkeypatch.setenv("LLMUX_LOCAL_CONFIG", str(local))
        catalog = folder.load("models: {m: {path: x.gguf}}", check_files=False)
        config = catalog.models["m"].config
        assert folder.path / "x.gguf" == config.path
        assert [str(folder.path / "sub/a"), str(folder.path / "home/b"), "/srv/models/c"] == [*map(str, config.folders)]
        assert folder.path / "sub/s" == catalog.server.state_dir


class TestSearch:
    """--config, $LLMUX_CONFIG, $XDG_CONFIG_HOME/llmux, the current folder."""

    def test_order(self, folder, monkeypatch):
        assert None is find_config()
        with pytest.raises(ConfigError, match="no configuration found; looked for"):
            load()
        here = folder.write("models:")
        assert here == find_config()
        xdg = folder.write("models:", "xdg/config/llmux/llmux.yaml")
        assert xdg == find_config()
        variable = folder.write("models:", "variable.yaml")
        monkeypatch.setenv("LLMUX_CONFIG", str(variable))
        assert variable == find_config()
        assert here == find_config(here)
        with pytest.raises(ConfigError, match="there is no such file"):
            find_config(folder.path / "none.yaml")
        with pytest.raises(ConfigError, match="a folder, and no configuration"):
            find_config(folder.path)
