"""Tasks: ladders of candidates under reserved names, in the configuration or in a file of their own."""

from __future__ import annotations

import msgspec
import pytest

from runtimes.base import Endpoint
from supervisor.catalog import Task

MODELS = """
models:
  big: {cmd: x, n_ctx: 8192}
  small: {cmd: x}
virtual_models:
  quick: {model: small, enable_thinking: false, defaults: {temperature: 0.7, top_p: 0.9}, force: {seed: 1}, strip: [stop]}
"""
LADDER = """
tasks:
  titles:
    candidates:
      - big
      - {model: quick, defaults: {temperature: 0.1}, force: {max_tokens: 20}, strip: [logit_bias]}
    pin_primary: true
    keep_alive_s: 60
    budget_s: 5.5
    allow_remote: true
    description: Titles of chats
"""


def fields_of(route, **sent):
    fields = {key: msgspec.Raw(msgspec.json.encode(value)) for key, value in sent.items()}
    route.rewrite.apply(fields, Endpoint("/v1/chat/completions"))
    return {key: msgspec.json.decode(value) for key, value in fields.items()}


class TestTasks:
    """A task is listed under its reserved name, and goes to its candidates with their own parameters."""

    def test_it_is_a_public_name(self, folder):
        catalog = folder.load(MODELS + LADDER)
        task = catalog.resolve("task:titles")
        assert isinstance(task, Task)
        assert [row.name for row in catalog.listing()] == ["quick", "big", "task:titles"]
        assert (task.model, task.description) == (catalog.models["big"], "Titles of chats")
        assert [candidate.name for candidate in task.candidates] == ["big", "quick"]
        assert task.candidates[1].model is catalog.models["small"]
        assert (task.config.pin_primary, task.config.keep_alive_s, task.config.budget_s) == (True, 60, 5.5)
        assert task.config.allow_remote
        assert catalog.route("titles") is task, "no model has that name"

    def test_a_model_keeps_its_name(self, folder):
        catalog = folder.load(MODELS + "tasks: {small: {candidates: [big]}, quick: {candidates: [big]}}")
        assert [catalog.resolve(name).name for name in ("small", "quick")] == ["small", "quick"]
        assert catalog.resolve("task:small").model is catalog.models["big"]

    def test_a_candidates_parameters_are_laid_over_those_of_its_virtual_model(self, folder):
        quick = folder.load(MODELS + LADDER).tasks["task:titles"].candidates[1]
        assert fields_of(quick, stop="x", logit_bias={}, top_p=0.5) == {
            "top_p": 0.5,
            "temperature": 0.1,
            "seed": 1,
            "max_tokens": 20,
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "none",
        }

    def test_its_own_switch_counts(self, folder):
        ladder = "tasks: {t: {candidates: [{model: quick, enable_thinking: true, params: {force: {seed: 2}}}]}}"
        route = folder.load(f"{MODELS}{ladder}").tasks["task:t"].candidates[0]
        assert fields_of(route)["chat_template_kwargs"] == {"enable_thinking": True}
        assert fields_of(route)["seed"] == 2

    def test_what_is_sized_is_the_same_model(self, folder):
        catalog = folder.load(MODELS + LADDER).sized(())
        task = catalog.tasks["task:titles"]
        assert task.model is task.candidates[0].model is catalog.models["big"]

    def test_other_names_may_hold_colons(self, folder):
        catalog = folder.load("models: {'qwen:8b': {cmd: x}}\ntasks: {'a:b': {candidates: ['qwen:8b']}}")
        assert [row.name for row in catalog.listing()] == ["qwen:8b", "task:a:b"]


class TestFile:
    """tasks.yaml beside the configuration is the section `tasks`."""

    def test_it_is_read(self, folder):
        folder.write("from_file: {candidates: [small]}\ntitles: {candidates: [small]}\n", "tasks.yaml")
        catalog = folder.load(MODELS + LADDER)
        assert list(catalog.tasks) == ["task:titles", "task:from_file"]
        assert [one.name for one in catalog.tasks["task:titles"].candidates] == ["small"]

    def test_its_problems_say_where_they_are(self, folder):
        folder.write("one:\n  candidates: [smal]\n", "tasks.yaml")
        assert folder.problems(MODELS) == [
            'tasks.yaml:2:16 tasks.one.candidates[0]: no model or virtual model "smal"; did you mean "small"?'
        ]

    def test_the_line_of_its_section_may_stand_above(self, folder):
        folder.write("tasks:\n  one: {candidates: [small]}\n", "tasks.yaml")
        assert list(folder.load(MODELS).tasks) == ["task:one"]
        folder.write("tasks: {candidates: [small]}\n", "tasks.yaml")
        assert list(folder.load(MODELS).tasks) == ["task:tasks"], "a task of that name"

    def test_an_empty_one_has_no_tasks(self, folder):
        folder.write("# nothing yet\n", "tasks.yaml")
        assert folder.load(MODELS).tasks == {}


class TestProblems:
    """Every mistake is told with its place."""

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("models: {'task:x': {cmd: x}}", 'models.task:x: names that begin with "task:" are those of tasks'),
            (
                "models: {m: {cmd: x}}\nvirtual_models: {'task:x': {model: m}}",
                'virtual_models.task:x: names that begin with "task:" are those of tasks',
            ),
            (
                "models: {m: {cmd: x}}\ntasks: {'task:x': {candidates: [m]}}",
                'tasks.task:x: names that begin with "task:" are those of tasks',
            ),
            ("models: {m: {cmd: x}}\ntasks: {t: {}}", 'tasks.t: the key "candidates" is missing'),
            ("models: {m: {cmd: x, enabled: false}}\ntasks: {t: {candidates: [m]}}", 'the model "m" is disabled'),
            ("models: {m: {cmd: x}}\ntasks: {t: {candidates: [m], budget_s: 0}}", "tasks.t.budget_s: "),
            ("models: {m: {cmd: x}}\ntasks: {t: {candidates: [{modle: m}]}}", 'did you mean "model"?'),
            ("models: {m: {cmd: x}}\ntasks: {t: {candidates: [{model: m, force: {stream: true}}]}}", "who answers"),
            (
                "models: {m: {cmd: x, has_switch: false}}\ntasks: {t: {candidates: [{model: m, enable_thinking: true}]}}",
                "no such switch for m",
            ),
        ],
    )
    def test_mistakes(self, folder, text, told):
        assert any(told in problem for problem in folder.problems(text))

    def test_an_empty_ladder(self, folder):
        assert folder.problems("models: {m: {cmd: x}}\ntasks: {t: {candidates: []}}")
