"""model-boss: what a manifest and its tasks become, and what is told. tests/golden/importers has whole files."""

from __future__ import annotations

import pytest

from supervisor.cli.importers import model_boss
from supervisor.errors import ConfigError
from tests.support.cases import cases
from tests.support.importing import notes


def imported(models, **tasks):
    draft = model_boss.convert({"models": models}, {"tasks": tasks})
    draft.settle()
    return draft


class TestManifest:
    """Keys of its own, and llama-server's options under their names."""

    @cases(
        ("models", "is_one"),
        [
            ({"a": {"path": "/a.gguf", "vram_mb": 1}}, True),
            ([{"id": "a", "category": "llm"}], True),
            ({"a": {"cmd": "x", "pin": True}}, False),
            ({"a": {"path": "/a.gguf"}}, True),
            ({"a": {"cmd": "x"}}, False),
            ({"a": {"proxy": "x"}}, False),
            ({}, False),
        ],
    )
    def test_it_is_told_from_llama_swaps_file(self, models, is_one):
        assert model_boss.is_manifest({"models": models}) is is_one

    def test_a_list_and_switches(self):
        draft = imported(
            [{"id": "a b", "path": "/a.gguf", "kv_unified": False, "jinja": True, "flash_attn": False, "temp": 0.2}]
        )
        assert draft.models["a-b"].items() >= {"kv_unified": False, "flash_attn": "off", "path": "/a.gguf"}.items()

    def test_a_namesake_with_another_meaning_stays_behind(self):
        draft = imported({"a": {"path": "/a.gguf", "priority": 900}})
        assert "priority" not in draft.models["a"]
        assert any(note.startswith("models.a.priority: counts downwards") for note in notes(draft))

    def test_what_was_injected_into_requests_gives_way_to_them(self):
        draft = imported(
            {"a": {"path": "/a.gguf", "thinking": "disabled"}, "b": {"path": "/b.gguf", "thinking": "some"}}
        )
        assert draft.virtual_models["a"]["defaults"]["chat_template_kwargs"] == {"enable_thinking": False}
        assert "models.b.thinking: expected true or false" in notes(draft)

    def test_without_models(self):
        with pytest.raises(ConfigError, match="no models"):
            imported({})


class TestTasks:
    """A ladder of names, of which Claude's need no entry."""

    def test_candidates_with_parameters(self):
        draft = imported(
            {"a": {"path": "/a.gguf"}},
            t={"candidates": [{"model": "a", "force": {"seed": 1}}, "claude:opus"], "keep_alive_s": 9},
        )
        assert draft.tasks["t"] == {
            "candidates": [{"model": "a", "force": {"seed": 1}}, "claude:opus"],
            "keep_alive_s": 9,
        }
        assert draft.models["claude:opus"]["upstream_model"] == "opus"

    def test_what_is_not_valid_is_told(self):
        draft = imported({"a": {"path": "/a.gguf"}}, t={"candidates": ["a"], "budget_s": "long"}, u={})
        assert draft.tasks == {"t": {"candidates": ["a"]}}
        assert {note.where for note in draft.notes if note.lost} >= {"tasks.t.budget_s", "tasks.u"}
