"""Keep-alives by type, and the names of the models that come back."""

from __future__ import annotations

import pytest

from runtimes.registry import REGISTRY

REAL = {"registry": REGISTRY, "check_files": False}
MODELS = """
models:
  chat: {cmd: [x, "${port}"]}
  brief: {cmd: [x, "${port}"], keep_alive_s: 20}
  own: {cmd: [x, "${port}"], keep_alive_s: forever}
  seer: {cmd: [x, "${port}"], modalities: [text, image]}
  eyes: {cmd: [x, "${port}"], type: vision}
  painter: {cmd: [x, "${port}"], type: image, modalities: [text, image]}
  voice: {cmd: [x, "${port}"], type: tts}
  off: {cmd: [x, "${port}"], enabled: false}
  far: {runtime: openai_remote, base_url: "https://api.example.org/v1", upstream_model: m}
virtual_models:
  assistant: {model: chat}
  away: {model: nothing}
"""
SOUND = MODELS.replace("  away: {model: nothing}\n", "")


def keep_alives(catalog) -> dict[str, float | None]:
    return {spec.id: spec.keep_alive_s for spec in catalog.model_specs() if not spec.remote}


class TestKeepAlive:
    """A model's own counts; else that of its type; else it stays until its memory is needed."""

    @pytest.mark.parametrize(
        ("limits", "chat", "seer", "eyes", "painter", "voice"),
        [
            ("{}", None, None, None, None, None),
            ("{keep_alive: by_type}", 300, 300, 60, 900, None),
            ("{keep_alive: {llm: 30, tts: 5.5}}", 30, 30, None, None, 5.5),
            ("{keep_alive: {llm: 30, vision: forever}}", 30, 30, None, None, None),
        ],
    )
    def test_by_type(self, folder, limits, chat, seer, eyes, painter, voice):
        catalog = folder.load(f"{SOUND}limits: {limits}", **REAL)
        by_type = {"chat": chat, "seer": seer, "eyes": eyes, "painter": painter, "voice": voice}
        shown = by_type | {"brief": 20, "own": None}
        assert keep_alives(catalog) == shown

    def test_only_what_an_entry_says_in_seconds_keeps_less_urgent_requests_away(self, folder):
        catalog = folder.load(f"{SOUND}limits: {{keep_alive: by_type}}", **REAL)
        own = {spec.id: spec.own_keep_alive_s for spec in catalog.model_specs() if spec.own_keep_alive_s}
        assert own == {"brief": 20}

    @pytest.mark.parametrize(
        ("written", "told"),
        [
            ("by_tipe", 'expected "by_type" or a mapping, got "by_tipe"; did you mean "by_type"?'),
            ("{lm: 5}", 'no model type; did you mean "llm"?'),
            ("{llm: 0}", 'expected more than 0 or "forever", got 0'),
        ],
    )
    def test_mistakes(self, folder, written, told):
        (problem,) = folder.problems(f"{SOUND}limits: {{keep_alive: {written}}}", **REAL)
        assert told in problem


class TestHold:
    def test_of_a_model(self, folder):
        catalog = folder.load('models: {m: {cmd: [x, "${port}"], hold_s: 20}, n: {cmd: [x, "${port}"]}}', **REAL)
        assert [spec.hold_s for spec in catalog.model_specs()] == [20.0, 0.0]


class TestDefaultModel:
    """A name, or several, of models that can be loaded here."""

    @pytest.mark.parametrize(
        ("written", "models"),
        [
            ("chat", ("chat",)),
            ("assistant", ("chat",)),
            ("[voice, assistant, chat]", ("voice", "chat")),
            ("[]", ()),
        ],
    )
    def test_names(self, folder, written, models):
        assert folder.load(f"{SOUND}limits: {{default_model: {written}}}", **REAL).policy.default_models == models

    def test_none_by_default(self, folder):
        catalog = folder.load(SOUND, **REAL)
        assert (catalog.policy.default_models, catalog.limits.limits().default_after_s) == ((), 300.0)

    @pytest.mark.parametrize(
        ("written", "told"),
        [
            ("chta", 'limits.default_model: no model "chta"; did you mean "chat"?'),
            ("[voice, off]", 'limits.default_model[1]: the model "off" is disabled, so it can\'t come back: enable it'),
            ("far", 'limits.default_model: "far" runs elsewhere: it is never unloaded, and needs no return'),
        ],
    )
    def test_mistakes(self, folder, written, told):
        (problem,) = folder.problems(f"{SOUND}limits: {{default_model: {written}}}", **REAL)
        assert problem.endswith(told)

    def test_a_virtual_model_that_is_wrong_itself_is_told_once(self, folder):
        (problem,) = folder.problems(f"{MODELS}limits: {{default_model: away}}", **REAL)
        assert "virtual_models.away.model" in problem
