"""Configurations of other programs: what they become, what is told, and that the result is valid.

The whole files in `fixtures` are compared with what stands beside them (LLMUX_GOLDEN=update writes it anew).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from supervisor.catalog import load
from supervisor.cli.importers import llama_swap, llm_pool, presets
from supervisor.cli.importers.draft import Draft
from supervisor.cli.importers.llama_options import Options
from supervisor.errors import ConfigError
from tests import tiny
from tests.daemon import REPOSITORY, gguf, running
from tests.limits import LIMIT_S

FIXTURES = Path(__file__).parent / "fixtures"
SOURCES = {
    "llama-swap": ["llama-swap.yaml"],
    "presets": ["presets.ini"],
    "llm-pool": ["settings.json", "local.json"],
}


def llmux(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "supervisor.cli", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, cwd=REPOSITORY, env=os.environ | env, check=False
    )


def swap(text_or_models: dict[str, Any], **sections: Any) -> Draft:
    draft = llama_swap.convert({"models": text_or_models, **sections}, {"HOME": "/home/me"})
    draft.settle()
    return draft


def ini(text: str) -> Draft:
    draft = presets.convert(text)
    draft.settle()
    return draft


def notes(draft: Draft) -> list[str]:
    return [f"{note.where}: {note.message}" for note in draft.notes]


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

    def test_no_secret_comes_along(self):
        for golden in FIXTURES.glob("*.expected.*"):
            assert "secret" not in golden.read_text()

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


class TestLlamaServerOptions:
    """Its command line as keys, request defaults, and what is left."""

    @pytest.mark.parametrize(
        ("line", "keys"),
        [
            ("-m a.gguf -c 4096 -ngl 99", {"path": "a.gguf", "n_ctx": 4096, "n_gpu_layers": 99}),
            ("-m a.gguf --gpu-layers all -fa", {"path": "a.gguf", "n_gpu_layers": "all", "flash_attn": "on"}),
            ("-fa 0 --jinja", {"flash_attn": "off"}),
            ("-fa --no-jinja --no-mmproj-offload", {"flash_attn": "on", "jinja": False, "mmproj_offload": False}),
            ("--mlock", {"load_mode": "mmap+mlock"}),
            ("--mlock --no-mmap", {"load_mode": "mlock"}),
            ("--no-mmap", {"load_mode": "none"}),
            ("--embedding --pooling cls", {"type": "embedding", "pooling": "cls"}),
            ("--reranking", {"type": "embedding", "rerank": True}),
            ("--lora a,b --lora c", {"lora": ["a", "b", "c"]}),
            ("--ctx_size 1024", {"n_ctx": 1024}),
            ("--rope-freq-scale 0.5 --alias 7", {"rope_freq_scale": 0.5, "alias": "7"}),
            ("--sleep-idle-seconds 60", {"keep_alive_s": 60}),
            ("--host 0.0.0.0 --port 1 --metrics --no-webui", {}),
            ("-np -1 -ngl auto", {}),
            ("--n-cpu-moe 3 --no-warmup", {"extra_args": ["--n-cpu-moe", "3", "--no-warmup"]}),
            ("--override-kv -1", {"extra_args": ["--override-kv", "-1"]}),
        ],
    )
    def test_keys(self, line, keys):
        assert Options.read(line.split()).keys == keys

    def test_request_defaults(self):
        line = '--temp 0 --top-k 20 -n -1 --seed -1 --chat-template-kwargs {"a":1}'
        assert Options.read(line.split()).defaults == {
            "temperature": 0,
            "top_k": 20,
            "chat_template_kwargs": {"a": 1},
        }

    def test_what_is_llmuxs_own(self):
        options = Options.read(["--api-key", "x", "--split-mode", "row", "--fit", "on", "-hf", "a/b"])
        assert options.keys == {}
        assert [option for option, _ in options.lost] == ["--api-key", "--split-mode", "--fit"]
        assert options.is_remote


class TestLlamaSwap:
    """What a golden file shows badly."""

    def test_macros(self):
        draft = swap(
            {
                "m": {"macros": [{"n": 7}], "cmd": "x --port ${PORT} ${a}", "filters": {"setParams": {"seed": "${n}"}}},
            },
            macros=[{"n": 1}, {"b": "${n}-${MODEL_ID}"}, {"a": "--name ${b} ${env.HOME}"}],
        )
        assert draft.models["m"]["cmd"] == ["x", "--port", "${port}", "--name", "7-m", "/home/me"]
        assert draft.virtual_models["m"]["force"] == {"seed": 7}

    def test_macros_that_contain_each_other(self):
        with pytest.raises(ConfigError, match="contain each other"):
            swap({"m": {"cmd": "${a}"}}, macros={"a": "${b}", "b": "${a}"})

    def test_one_model_at_a_time(self):
        models = {name: {"cmd": "x ${PORT}"} for name in ("a", "b")}
        group = {"all": {"members": ["a", "b"]}}
        assert swap(models, groups=group).limits == {"max_loaded": {"llm": 1}}
        assert swap(models | {"c": {"cmd": "y ${PORT}"}}, groups=group).limits == {}

    def test_ports_that_are_fixed(self):
        draft = swap(
            {
                "found": {"cmd": "x --listen=127.0.0.1:9000", "proxy": "http://localhost:9000"},
                "unknown": {"cmd": "x"},
                "away": {"cmd": "x ${PORT}", "proxy": "http://192.168.1.5:${PORT}"},
            }
        )
        assert draft.models["found"]["cmd"] == ["x", "--listen=127.0.0.1:${port}"]
        assert [draft.models[name].get("enabled") for name in draft.models] == [None, False, False]

    def test_other_dollars_stay_as_they_look(self):
        draft = swap({"m": {"cmd": "x ${PORT} $HOME ${MODEL_ID}", "env": ["A=$B"]}})
        assert draft.models["m"]["cmd"] == ["x", "${port}", "$HOME", "m"]
        assert draft.models["m"]["env"] == {"A": "$B"}

    def test_values_that_are_not_valid_are_told_and_left_out(self):
        draft = swap({"m": {"cmd": "x ${PORT}", "ttl": 60, "checkEndpoint": "no-slash"}})
        assert draft.models["m"] == {"cmd": ["x", "${port}"], "keep_alive_s": 60}
        assert any("health_path" in note for note in notes(draft))

    def test_relative_paths_are_told(self):
        assert any("m/a.gguf starts from" in note for note in notes(swap({"m": {"cmd": "llama-server -m m/a.gguf"}})))


class TestPresets:
    """INI as llama.cpp reads it."""

    def test_sections(self):
        sections = presets.parse("version = 1\n[*]\r\nc = 1 ; no\n[ a b ] # yes\nm=x#y\n[a b]\nm = z\n")
        assert sections == {"": {"version": "1"}, "*": {"c": "1"}, "a b": {"m": "z"}}

    def test_own_goes_over_shared_whatever_its_spelling(self):
        draft = ini("[*]\nctx-size = 1\nno-kv-unified = true\n[a]\nm = /a.gguf\nLLAMA_ARG_CTX_SIZE = 2\nkvu = 1\n")
        assert draft.models == {"a": {"path": "/a.gguf", "n_ctx": 2, "kv_unified": True}}

    def test_switches(self):
        draft = ini("[a]\nm = /a.gguf\nc = 0\nwarmup = false\nno-mmap = off\nembeddings = 0\nflash-attn = true\n")
        assert draft.models["a"] == {
            "path": "/a.gguf",
            "n_ctx": 0,
            "extra_args": ["--no-warmup"],
            "load_mode": "mmap",
            "flash_attn": "on",
        }


class TestLlmPool:
    """settings.json with local.json over it."""

    def test_merge(self):
        assert llm_pool.merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2]}) == {
            "a": {"b": 3, "c": 2},
            "d": [2],
        }

    def test_shared_stop_words_come_along(self):
        models = {"a": {"backend": "llama_server", "model_path": "/a.gguf"}}
        draft = llm_pool.convert({"engine": {"decoding": {"stop": ["</s>"]}, "models": models}})
        draft.settle()
        assert draft.virtual_models["a"]["defaults"] == {"stop": ["</s>"]}
        assert notes(draft) == []

    def test_vllm_fields_and_options(self):
        """Both become keys; a field of its own wins over an option."""
        fields = {
            "vllm_model": "Qwen/Qwen3-8B",
            "vllm_max_model_len": 4096,
            "vllm_enable_prefix_caching": False,
            "vllm_max_pixels": 4014080,
            "vllm_kv_cache_memory_bytes": 1 << 30,
            "vllm_unheard_of": 1,
            "vllm_serve_host": "0.0.0.0",
            "vllm_serve_api_key": "secret",
            "vllm_serve_extra_args": [
                *(
                    "--max-num-seqs",
                    "1",
                    "--max_num_batched_tokens=2048",
                    "--max-model-len",
                    "99",
                    "--quantization",
                    "modelopt",
                ),
                *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--no-enforce-eager", "--port", "9"),
                *("--default-chat-template-kwargs", '{"enable_thinking": false}', "--attention-backend", "triton_attn"),
                *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2, "quantization": "fp8"}'),
                *("--num-gpu-blocks-override", "9", "-O3"),
            ],
        }
        draft = llm_pool.convert({"engine": {"models": {"a": {"backend": "vllm_serve", **fields}}}})
        assert draft.models["a"] == {
            "runtime": "vllm_serve",
            "model": "Qwen/Qwen3-8B",
            "max_model_len": 4096,
            "enable_prefix_caching": False,
            "max_pixels": 4014080,
            "kv_cache_memory_bytes": 1 << 30,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 2048,
            "quantization": "modelopt",
            "tool_call_parser": "hermes",
            "enforce_eager": False,
            "default_chat_template_kwargs": {"enable_thinking": False},
            "speculative_method": "mtp",
            "num_speculative_tokens": 2,
            "extra_args": ["--attention-backend", "triton_attn", "-O3"],
        }
        assert notes(draft) == [
            "engine.models.a.vllm_unheard_of: vllm_serve has no such key; try extra_args",
            "engine.models.a.vllm_serve_host: llmux chooses it",
            "engine.models.a.vllm_serve_api_key: llmux chooses it",
            "engine.models.a.vllm_serve_extra_args.--port: llmux chooses it",
            "engine.models.a.vllm_serve_extra_args.--speculative-config.quantization: vllm_serve has no such key",
            "engine.models.a.vllm_serve_extra_args.--num-gpu-blocks-override: kv_cache_memory_bytes says how large the cache is",
        ]

    def test_a_share_of_a_device_sizes_no_cache(self):
        fields = {
            "vllm_model": "/m",
            "vllm_gpu_memory_utilization": 0.9,
            "vllm_max_model_len": 9,
            "vllm_max_num_seqs": 1,
        }
        draft = llm_pool.convert({"engine": {"models": {"a": {"backend": "vllm", **fields}}}})
        assert draft.models["a"] == {"runtime": "vllm_serve", "path": "/m", "max_model_len": 9, "max_num_seqs": 1}
        (note,) = notes(draft)
        assert note.startswith("engine.models.a.vllm_gpu_memory_utilization: the KV cache is as large as one")

    def test_models_that_are_none(self):
        models = {"a": 3, "b": {}, "c": {"backend": "vllm"}, "d": {"backend": "llama_cpp", "model_path": "/d.gguf"}}
        draft = llm_pool.convert({"engine": {"models": models}})
        assert list(draft.models) == ["d"]
        assert notes(draft)[:3] == [
            "engine.models.a: expected an object",
            "engine.models.b: it has no backend",
            "engine.models.c: it has no vllm_model",
        ]

    def test_an_address_that_others_reach(self):
        models = {"a": {"backend": "llama_server", "model_path": "/a.gguf"}}
        draft = llm_pool.convert({"service": {"host": "0.0.0.0"}, "engine": {"models": models}})
        assert notes(draft) == ["service.host: others reach 0.0.0.0, so llmux wants keys: llmux keys add NAME"]

    def test_a_model_without_a_file_is_left_out(self):
        draft = llm_pool.convert({"engine": {"models": {"a": {"backend": "llama_server", "model_path": None}}}})
        draft.settle()
        assert draft.models == {}
        assert notes(draft) == ["models.a: is left out: nothing is left that could be run"]
