"""The ctranslate2 runtime: what it says of a folder, and real models through the daemon, loaded, asked, cancelled, unloaded."""

from __future__ import annotations

import json
import shutil

import openai
import pytest

from runtimes import device_kind
from runtimes.base import LaunchContext
from runtimes.ctranslate2.adapter import CTranslate2Adapter
from runtimes.device_kind import DeviceAssignment
from tests.support import environments, tiny_ctranslate2
from tests.support.daemon import running
from tests.support.tiny_ctranslate2 import FRENCH, GERMAN
from tests.support.tiny_language import ANSWER, THOUGHT

ADAPTER = CTranslate2Adapter()


def config(path=None, **keys):
    return ADAPTER.config(runtime="ctranslate2", path=path or tiny_ctranslate2.language(), **keys)


def problems(path=None, **keys):
    return ADAPTER.check(config(path, **keys), runtimes_dir=None)


class TestAdapter:
    """What a folder is for is read from it."""

    def test_good(self):
        assert (
            problems() == problems(tiny_ctranslate2.translator()) == problems(tiny_ctranslate2.translator("pair")) == ()
        )

    def test_weights_are_int8_unless_told(self):
        assert config().compute_type == "int8"
        assert ADAPTER.estimate(config(compute_type="float32")).mib > ADAPTER.estimate(config()).mib

    def test_no_folder(self, tmp_path):
        (problem,) = problems(tmp_path / "none")
        assert "there is no such folder" in problem
        assert ADAPTER.estimate(config(tmp_path / "none")) is None

    def test_no_tokenizer(self, tmp_path):
        folder = shutil.copytree(tiny_ctranslate2.language(), tmp_path / "model")
        (folder / "tokenizer.json").unlink()
        (problem,) = problems(folder)
        assert "no tokenizer" in problem
        assert "--copy_files" in problem

    def test_more_than_its_positions(self):
        (problem,) = problems(tiny_ctranslate2.translator(), n_ctx=513)
        assert "made for 512 tokens" in problem

    def test_capabilities(self):
        language, translator, pair = (
            ADAPTER.capabilities(config(path))
            for path in (None, tiny_ctranslate2.translator(), tiny_ctranslate2.translator("pair"))
        )
        assert (language.multi_turn, language.tools, language.thinking) == (False, False, True)
        assert (language.translates, translator.translates, pair.translates) == (False, True, False)
        assert (language.context, translator.context) == (4096, 512)

    def test_a_gpu_and_its_libraries(self, tmp_path):
        library = tmp_path / "ctranslate2" / "lib" / "python3.11" / "site-packages" / "nvidia" / "cublas" / "lib"
        library.mkdir(parents=True)
        python = tmp_path / "ctranslate2" / "bin" / "python"
        python.parent.mkdir()
        python.touch()
        gpu = DeviceAssignment("gpu0", device_kind.CUDA, 0, "GPU-1")
        spec = ADAPTER.launch(config(), LaunchContext("m", "127.0.0.1", 4000, "key", (gpu,), tmp_path))
        assert json.loads(spec.argv[-1])["device"] == "cuda"
        assert str(library) in spec.library_path


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    environments.installed("ctranslate2")
    keys = {"runtime": "ctranslate2", "threads": 1}
    models = {
        "language": {**keys, "path": str(tiny_ctranslate2.language()), "n_ctx": 1024},
        "endless": {**keys, "path": str(tiny_ctranslate2.language(endless=True)), "n_ctx": 100_000, "vram_mib": 200},
        "languages": {**keys, "path": str(tiny_ctranslate2.translator())},
        "pair": {**keys, "path": str(tiny_ctranslate2.translator("pair")), "beam_size": 2},
    }
    with running(tmp_path_factory.mktemp("ctranslate2"), {"models": models}) as started:
        yield started


@pytest.fixture
def sdk(daemon):
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(text: str = "hi", *before: dict[str, str]) -> dict[str, object]:
    return {"messages": [*before, {"role": "user", "content": text}]}


class TestLanguageModel:
    """Thoughts, streams, and what a single turn is."""

    def test_a_chat(self, sdk):
        answer = sdk.chat.completions.create(
            model="language", **asked("hi", {"role": "system", "content": "Be brief."})
        )
        (choice,) = answer.choices
        assert (choice.message.content, choice.message.reasoning_content) == (ANSWER, THOUGHT)
        assert choice.finish_reason == "stop"
        assert answer.usage.completion_tokens == 16

    def test_a_stream(self, sdk):
        events = list(sdk.chat.completions.create(model="language", stream=True, **asked()))
        said = [event.choices[0].delta.content or "" for event in events]
        assert "".join(said) == ANSWER
        assert sum(map(bool, said)) > 3, "it comes as it is generated"

    def test_thinking_is_switched_off(self, sdk):
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        answer = sdk.chat.completions.create(model="language", extra_body=off, **asked())
        assert answer.choices[0].message.content == ANSWER
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0

    def test_the_longest_answer_and_stop_strings(self, sdk):
        create = sdk.chat.completions.create
        assert create(model="language", max_tokens=3, **asked()).choices[0].finish_reason == "length"
        assert create(model="language", stop=[" tiny"], **asked()).choices[0].message.content == "Hello from a"

    def test_a_completion_and_its_log_probabilities(self, sdk):
        answer = sdk.completions.create(model="language", prompt="assistant\n", logprobs=0)
        assert "Hello from a" in answer.choices[0].text
        assert min(answer.choices[0].logprobs.token_logprobs) > -0.1

    def test_sampling(self, sdk):
        answer = sdk.chat.completions.create(
            model="language", temperature=0.5, top_p=0.9, extra_body={"top_k": 3}, **asked()
        )
        assert answer.choices[0].message.content == ANSWER

    @pytest.mark.parametrize("sampling", [{"top_p": 0}, {"top_k": 100_000}], ids=["narrowest", "widest"])
    def test_the_narrowest_and_the_widest_choice(self, daemon, sampling):
        """CTranslate2 itself refuses both."""
        answer = daemon.post("/v1/chat/completions", json={"model": "language", **asked(), **sampling})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == ANSWER

    @pytest.mark.parametrize("kind", ["video", ["text"], {}, None])
    def test_parts_of_another_kind_are_refused(self, daemon, kind):
        messages = [{"role": "user", "content": [{"type": kind, "text": "hi"}]}]
        answer = daemon.post("/v1/chat/completions", json={"model": "language", "messages": messages})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "modality_unsupported"

    def test_several_turns_are_refused(self, sdk):
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
        with pytest.raises(openai.BadRequestError, match="single turns only") as told:
            sdk.chat.completions.create(model="language", **asked("and?", *turns))
        assert (told.value.code, told.value.param) == ("multi_turn_unsupported", "messages")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("min_p", 0.1),
            ("presence_penalty", 1),
            ("logit_bias", {"1": 2}),
            ("top_logprobs", 2),
            ("n", 2),
            ("tools", [{"type": "function", "function": {"name": "f"}}]),
            ("response_format", {"type": "json_object"}),
        ],
    )
    def test_what_there_is_not_is_refused_by_name(self, daemon, field, value):
        answer = daemon.post(
            "/v1/chat/completions", json={"model": "language", **asked(), field: value, "logprobs": True}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field

    def test_a_prompt_too_long(self, sdk):
        with pytest.raises(openai.BadRequestError, match="raise n_ctx") as told:
            sdk.chat.completions.create(model="language", **asked("x" * 2000))
        assert told.value.code == "context_length_exceeded"

    def test_one_who_leaves_is_not_answered_any_longer(self, daemon):
        with (
            daemon.client() as client,
            client.stream(
                "POST", "/v1/chat/completions", json={"model": "endless", "stream": True, **asked()}
            ) as answer,
        ):
            lines = answer.iter_lines()
            for _ in range(6):
                next(lines)
        answer = daemon.post("/v1/chat/completions", json={"model": "endless", "max_tokens": 4, **asked()})
        assert answer.status_code == 200, "the only slot is free again"


class TestTranslation:
    """The text goes in, its translation comes out."""

    def test_the_languages_are_told(self, sdk):
        for code, said in (("deu_Latn", GERMAN), ("fra_Latn", FRENCH)):
            codes = {"source_lang_code": "eng_Latn", "target_lang_code": code}
            answer = sdk.chat.completions.create(model="languages", extra_body=codes, **asked("Hello from"))
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (said, "stop")
            assert answer.usage.prompt_tokens == 4

    def test_in_a_part_of_the_message_too(self, daemon):
        part = {"type": "text", "text": "Hello", "target_lang_code": "fra_Latn"}
        answer = daemon.chat("languages", messages=[{"role": "user", "content": [part]}])
        assert answer.json()["choices"][0]["message"]["content"] == FRENCH

    def test_as_a_completion_with_beams(self, sdk):
        wanted = {"target_lang_code": "deu_Latn", "beam_size": 4}
        answer = sdk.completions.create(model="languages", prompt="Hello from", extra_body=wanted)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (GERMAN, "stop")
        with pytest.raises(openai.BadRequestError, match="a search with beams tells none"):
            sdk.completions.create(model="languages", prompt="Hello", extra_body=wanted, logprobs=0)

    def test_through_llm_pools_api(self, daemon):
        body = {"model": "languages", "input": "Hello", "target_lang_code": "deu_Latn", "decoding": {"beam_size": 2}}
        answer = daemon.post("/v1/responses", json=body)
        assert answer.json()["output_text"] == GERMAN
        refused = daemon.post("/v1/responses", json={**body, "target_lang_code": None, "source_lang_code": "eng_Latn"})
        assert refused.json()["error"]["param"] == "target_lang_code"
        refused = daemon.post("/v1/responses", json={**body, "input": "word " * 2000})
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")

    def test_a_language_that_is_needed_or_unknown(self, daemon):
        for codes, code in (({}, "missing_parameter"), ({"target_lang_code": "xx"}, "invalid_request")):
            answer = daemon.post("/v1/chat/completions", json={"model": "languages", **asked(), **codes})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, "target_lang_code", code)
            assert "deu_Latn" in error["message"]

    def test_one_pair_with_sentence_pieces(self, daemon):
        answer = daemon.chat("pair", text="Hello from a tiny model")
        assert answer.json()["choices"][0]["message"]["content"].startswith("Hallo")
        refused = daemon.post("/v1/completions", json={"model": "pair", "prompt": "Hello", "target_lang_code": "de"})
        assert "one pair of languages" in refused.json()["error"]["message"]

    @pytest.mark.parametrize(("model", "codes"), [("languages", {"target_lang_code": "deu_Latn"}), ("pair", {})])
    def test_an_empty_text_has_an_empty_translation(self, daemon, model, codes):
        answer = daemon.post("/v1/chat/completions", json={"model": model, **asked(""), **codes})
        (choice,) = answer.json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")

    def test_a_switch_for_thinking_has_no_effect_and_other_arguments_are_refused(self, daemon):
        """As a default of all models alike, the switch must break none."""
        switch = {"chat_template_kwargs": {"enable_thinking": False}}
        answer = daemon.post("/v1/chat/completions", json={"model": "pair", "max_tokens": 2, **asked(), **switch})
        assert (answer.status_code, answer.headers["x-llmux-ignored"]) == (200, "chat_template_kwargs.enable_thinking")
        other = {"chat_template_kwargs": {"enable_tools": True}}
        answer = daemon.post("/v1/chat/completions", json={"model": "pair", **asked(), **other})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")

    def test_nothing_from_the_system(self, daemon):
        answer = daemon.post(
            "/v1/chat/completions", json={"model": "languages", **asked("a", {"role": "system", "content": "b"})}
        )
        assert answer.status_code == 400


def test_it_is_unloaded(daemon):
    daemon.chat("pair", text="Hello")
    assert daemon.post("/v1/admin/models/pair/unload").status_code < 300
    daemon.wait_state("pair", "stopped")
