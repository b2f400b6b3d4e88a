"""Configurations of llama-swap: what they become, and what is told."""

from __future__ import annotations

import pytest

from supervisor.errors import ConfigError
from tests.support.importing import notes, swap


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

    def test_names_that_differ_in_spaces_stay_two_models(self):
        draft = swap({"a b": {"cmd": "x ${PORT}", "aliases": ["a  b"]}, "a-b": {"cmd": "y ${PORT}"}})
        assert {name: model["cmd"][0] for name, model in draft.models.items()} == {"a-b-2": "x", "a-b": "y"}
        assert draft.virtual_models["a-b-3"]["model"] == "a-b-2"
        assert 'a b: is called "a-b-2" now: "a-b" is the name of another' in notes(draft)

    def test_one_model_at_a_time(self):
        models = {name: {"cmd": "x ${PORT}"} for name in ("a", "b")}
        group = {"all": {"members": ["a", "b"]}}
        assert swap(models, groups=group).limits == {"max_loaded": {"llm": 1}}
        assert swap(models | {"c": {"cmd": "y ${PORT}"}}, groups=group).limits == {}

    def test_the_same_under_routing(self):
        models = {name: {"cmd": "x ${PORT}"} for name in ("a", "b")}
        settings = {"groups": {"all": {"members": ["a", "b"]}}, "matrix": {"sets": {}}}
        fifo = {"use": "fifo", "settings": {"fifo": {"priority": {"a": 1}}}}
        draft = swap(models, routing={"router": {"use": "group", "settings": settings}, "scheduler": fifo})
        assert draft.limits == {"max_loaded": {"llm": 1}}
        assert any(note.startswith("routing.scheduler.settings.fifo.priority: requests say") for note in notes(draft))
        draft = swap(models, routing={"router": {"use": "matrix", "settings": settings}})
        assert draft.limits == {}
        assert any(note.startswith("routing.router.settings.matrix: llmux decides by memory") for note in notes(draft))

    def test_selectors_are_tasks(self):
        models = {"a": {"cmd": "x ${PORT}", "aliases": ["first"]}, "b": {"cmd": "x ${PORT}"}}
        selectors = {
            "code": {"strategy": "warm", "targets": ["first", "b", "gone"], "name": "Code", "metadata": {}},
            "plan": {"strategy": "pin", "targets": ["b", "a"], "unlisted": True},
            "load": {"strategy": "spillover", "targets": ["a", "b"], "settings": {"spillover": 4}},
            "none": {"strategy": "warm", "targets": ["gone"]},
        }
        draft = swap(models, selectors=selectors)
        assert draft.tasks == {
            "code": {"candidates": ["first", "b"], "description": "Code"},
            "plan": {"candidates": ["b"]},
            "load": {"candidates": ["a", "b"]},
        }
        lost = {note.where for note in draft.notes if note.lost}
        assert lost >= {"selectors.plan.targets", "selectors.load.strategy", "selectors.code.metadata", "tasks.none"}

    def test_loading_states(self):
        models = {"a": {"cmd": "x ${PORT}"}, "b": {"cmd": "x ${PORT}", "sendLoadingState": False}}
        draft = swap(models, sendLoadingState=True)
        assert draft.server == {"load_feedback": True}
        assert [note.where for note in draft.notes if note.lost] == ["models.b.sendLoadingState"]
        assert swap(models).server == {}

    def test_time_to_end_and_inputs(self):
        draft = swap(
            {
                "own": {"cmd": "x ${PORT}", "unloadTimeout": 30, "capabilities": {"in": ["text", "image", "video"]}},
                "shared": {"cmd": "x ${PORT}", "capabilities": {"in": ["text"]}},
            },
            unloadTimeout=5,
        )
        assert [draft.models[name]["grace_s"] for name in ("own", "shared")] == [30, 5]
        assert [draft.models[name].get("modalities") for name in ("own", "shared")] == [["text", "image"], None]

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

    def test_containers_run_as_they_are(self):
        run = "docker run --rm -p ${PORT}:8080 --name ${MODEL_ID} image"
        draft = swap({"m": {"cmd": run, "cmdStop": "docker stop ${MODEL_ID}"}})
        assert draft.models["m"] == {
            "cmd": ["docker", "run", "--rm", "-p", "${port}:8080", "--name", "m", "image"],
            "stop_cmd": ["docker", "stop", "m"],
        }
        assert notes(draft) == ["models.m.cmd: llmux can't measure the memory of a container: set vram_mib"]

    @pytest.mark.parametrize(("switch", "told"), [("-d", "remove -d"), ("-P", "-P publishes every port of the image")])
    def test_containers_that_need_a_look(self, switch, told):
        draft = swap({"m": {"cmd": f"docker run {switch} -p ${{PORT}}:8080 image"}})
        first, memory = notes(draft)
        assert told in first
        assert memory.endswith("set vram_mib")

    def test_other_names_of_a_model_that_is_switched_off(self):
        draft = swap({"unknown": {"cmd": "x", "aliases": ["other"], "description": "Mine"}})
        assert list(draft.virtual_models) == ["unknown"]
        assert "virtual_models.other: unknown is switched off, so nothing would answer" in notes(draft)

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
