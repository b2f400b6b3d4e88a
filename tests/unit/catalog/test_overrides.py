"""Overrides for a load: what the runtime lets an operator set, and in which range."""

from __future__ import annotations

import json

import pytest

from supervisor.catalog import load
from supervisor.catalog.models.overrides import overridden, renamed
from supervisor.errors import InvalidRequestError
from tests.support import hf_folder, tiny


class TestDraftLength:
    """The file takes what llama.cpp takes; an override stays within the narrower range of a load."""

    @pytest.fixture
    def model(self, tmp_path):
        file = tmp_path / "llmux.yaml"
        file.write_text(f"models: {{m: {{path: {tiny.model()}, spec_draft_n_max: 16}}}}")
        return load(file).models["m"]

    def test_the_file_has_llama_cpps_range(self, model):
        assert model.config.spec_draft_n_max == 16

    def test_within_the_range_of_a_load(self, model, tmp_path):
        changed = overridden(model, {"spec_draft_n_max": 6}, runtimes_dir=tmp_path)
        assert changed.config.spec_draft_n_max == 6

    @pytest.mark.parametrize(("value", "told"), [(7, "at most 6, got 7"), (0, "at least 1, got 0")])
    def test_beyond_it(self, model, tmp_path, value, told):
        with pytest.raises(InvalidRequestError, match=f"^overrides.spec_draft_n_max: expected {told}$"):
            overridden(model, {"spec_draft_n_max": value}, runtimes_dir=tmp_path)

    def test_beside_another_mistake(self, model, tmp_path):
        """Both are told."""
        with pytest.raises(InvalidRequestError) as refused:
            overridden(model, {"spec_draft_n_max": 7, "spec_draft_p_min": 1.5}, runtimes_dir=tmp_path)
        assert refused.value.detail == (
            "overrides.spec_draft_p_min: expected at most 1, got 1.5",
            "overrides.spec_draft_n_max: expected at most 6, got 7",
        )

    def test_by_llm_pools_names(self, model, tmp_path):
        values = renamed(model, {"llama_server_spec_draft_n_max": 4, "llama_server_spec_type": "draft", "n_ctx": 512})
        assert values == {"spec_draft_n_max": 4, "spec_type": "draft-simple", "n_ctx": 512}

    def test_by_the_name_of_another_backend(self, model, tmp_path):
        """It means something else there: whoever wants it is told what the key is called here."""
        values = renamed(model, {"gguf_n_ctx": 512, "vllm_spec_type": "ngram"})
        assert values == {"gguf_n_ctx": 512, "vllm_spec_type": "ngram"}
        with pytest.raises(InvalidRequestError, match='for a load; did you mean "n_ctx"'):
            overridden(model, values, runtimes_dir=tmp_path)

    def test_other_overrides_leave_the_file_as_it_is(self, model, tmp_path):
        assert overridden(model, {"n_ctx": 1024}, runtimes_dir=tmp_path).config.spec_draft_n_max == 16


class TestChoices:
    """A path or name that vLLM would load is taken only where the file lists it."""

    @pytest.fixture
    def model(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        for name in ("small", "smaller"):
            (tmp_path / "hub" / f"models--org--{name}" / "refs").mkdir(parents=True)
            (tmp_path / "hub" / f"models--org--{name}" / "refs" / "main").write_text("abc\n")
            hf_folder.write(tmp_path / "hub" / f"models--org--{name}" / "snapshots" / "abc")
        entry = {
            "runtime": "vllm_serve",
            "path": str(hf_folder.write(tmp_path / "model")),
            "speculative_method": "draft_model",
            "speculative_model": "org/small",
            "speculative_models": ["org/smaller"],
        }
        file = tmp_path / "llmux.yaml"
        file.write_text(json.dumps({"models": {"m": entry}}))
        return load(file).models["m"]

    def test_by_llm_pools_names(self, model):
        values = renamed(
            model, {"vllm_max_model_len": 512, "vllm_speculative_model": "org/small", "vllm_dtype": "half"}
        )
        assert values == {"max_model_len": 512, "speculative_model": "org/small", "vllm_dtype": "half"}

    @pytest.mark.parametrize("value", ["org/small", "org/smaller"])
    def test_one_that_is_listed(self, model, tmp_path, value):
        changed = overridden(model, {"speculative_model": value}, runtimes_dir=tmp_path)
        assert changed.config.speculative_model == value

    def test_none(self, model, tmp_path):
        changed = overridden(model, {"speculative_model": None, "speculative_method": "ngram"}, runtimes_dir=tmp_path)
        assert changed.config.speculative_model is None

    @pytest.mark.parametrize("value", ["org/other", "/etc", "../small", ""])
    def test_any_other(self, model, tmp_path, value):
        with pytest.raises(InvalidRequestError, match=r"overrides\.speculative_model: expected "):
            overridden(model, {"speculative_model": value}, runtimes_dir=tmp_path)

    def test_the_list_itself_is_the_files(self, model, tmp_path):
        with pytest.raises(InvalidRequestError, match="can't be set for a load"):
            overridden(model, {"speculative_models": ["org/other"]}, runtimes_dir=tmp_path)
