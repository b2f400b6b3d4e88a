"""Models with a `prompt_format`: who writes their prompts, and what that leaves of them."""

from __future__ import annotations

import pytest

from runtimes.registry import REGISTRY
from supervisor.catalog.models.prompt_format import FORMATS, written_here
from supervisor.errors import ConfigError
from tests.support import tiny
from tests.support.cases import cases

REAL = {"registry": REGISTRY, "check_files": False}


class TestWhoWrites:
    """A worker's own template is used where it is of the same family."""

    @cases(
        ("name", "template", "here"),
        [
            ("generic", "{{ anything }}", False),
            ("generic", "", True),
            ("generic", None, False),
            ("qwen3_template", "<|im_start|>", False),
            ("qwen3_template", "[INST]", True),
            ("mistral_template", "[INST]", False),
            ("gemma4_template", "<start_of_turn>", True),
            ("gemma4_template", "<|turn>", False),
            ("translategemma_template", "source_lang_code", True),
            ("chatml", "<|im_start|>", True),
            ("raw", None, True),
        ],
    )
    def test_by_a_word_in_it(self, name, template, here):
        assert written_here(name, template) == (FORMATS[name] if here else None)


def catalog_of(folder, *models, more=""):
    listed = "".join(f"  m{at}: {{{model}}}\n" for at, model in enumerate(models))
    return folder.load(f"models:\n{listed}{more}", **REAL)


PROGRAM = 'cmd: [x, "${port}"]'


class TestModels:
    """By their files, where llmux can look into them."""

    def test_a_file_with_a_template_of_the_family(self, folder):
        path = tiny.model(name="tiny-chat")
        catalog = catalog_of(
            folder, f"path: {path}, prompt_format: qwen3_template", f"path: {path}, prompt_format: alpaca"
        )
        own, written = catalog.models.values()
        assert (own.prompts, own.endpoints) == (None, own.adapter.endpoints(own.config))
        assert written.prompts is FORMATS["alpaca"]

    def test_a_file_that_is_not_there_yet(self, folder):
        paths = ("path: /nowhere.gguf", "runtime: transformers, path: /nowhere", "runtime: vllm_serve, model: no/where")
        catalog = catalog_of(folder, *(f"{path}, prompt_format: gemma4_template" for path in paths))
        assert [model.prompts for model in catalog.models.values()] == [None] * 3

    def test_what_it_can_do(self, folder):
        (model,) = catalog_of(folder, f"{PROGRAM}, prompt_format: alpaca, modalities: [text, image]").models.values()
        known = model.capabilities
        assert (known.modalities, known.tools, known.thinking, known.multi_turn) == (("text",), False, False, False)
        assert (model.inputs, model.thinking) == ({"text"}, None)
        assert {path for path in model.paths if "chat" in path or "completions" in path} == {
            "POST /v1/chat/completions",
            "POST /v1/completions",
        }
        assert not {"POST /v1/messages", "POST /v1/responses"} & set(model.paths)

    def test_its_worker_stays_when_it_changes(self, folder):
        """It is run alike, and takes the same memory."""
        catalog = catalog_of(folder, PROGRAM, f"{PROGRAM}, prompt_format: raw")
        first, second = catalog.models.values()
        assert first.definition == second.definition

    def test_its_probe_needs_no_template(self, folder):
        first, second = catalog_of(folder, PROGRAM, f"{PROGRAM}, prompt_format: raw").models.values()
        asked = [one.adapter.smallest_request(one.config)[0] for one in (first, second)]
        assert asked == ["/v1/chat/completions", "/v1/completions"]

    def test_a_worker_that_completes_no_texts(self, folder):
        with pytest.raises(ConfigError, match="needs a worker that serves /v1/completions"):
            catalog_of(folder, f"{PROGRAM}, endpoints: [/v1/chat/completions], prompt_format: raw")

    def test_a_switch_that_the_format_lacks(self, folder):
        more = "virtual_models:\n  v: {model: m0, enable_thinking: false}\n"
        with pytest.raises(ConfigError, match="its raw format has no such switch"):
            catalog_of(folder, f"{PROGRAM}, prompt_format: raw", more=more)
        catalog_of(folder, f"{PROGRAM}, prompt_format: qwen3_template", more=more)
