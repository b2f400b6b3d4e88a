"""Names of models of a hub, and what their files are called."""

from __future__ import annotations

import pytest

from supervisor.catalog.assembly import is_name
from supervisor.cli.models.hub_models import Reference, _well_known_names, is_named, name_of, reference
from supervisor.errors import InvalidRequestError
from tests.support.cases import cases


class TestReference:
    """What people copy from a page, or from other programs."""

    @pytest.mark.parametrize(
        ("text", "wanted"),
        [
            ("acme/x-GGUF", Reference("acme/x-GGUF")),
            ("acme/x-GGUF:Q4_K_M", Reference("acme/x-GGUF", "Q4_K_M")),
            ("hf://acme/x-GGUF:Q4_K_M", Reference("acme/x-GGUF", "Q4_K_M")),
            ("hf.co/acme/x-GGUF:Q4_K_M", Reference("acme/x-GGUF", "Q4_K_M")),
            ("http://hub.test/acme/x-GGUF", Reference("acme/x-GGUF")),
            ("http://hub.test/acme/x-GGUF/tree/main", Reference("acme/x-GGUF")),
            ("http://hub.test/acme/x/blob/v2/a/b%20c.gguf?download=true", Reference("acme/x", "a/b c.gguf", "v2")),
            ("x-GGUF", None),
            ("acme/x/y", None),
            ("a b/c", None),
            ("acme/x:", None),
        ],
    )
    def test_reference(self, monkeypatch, text, wanted):
        monkeypatch.setenv("HF_ENDPOINT", "http://hub.test")
        assert reference(text) == wanted

    @pytest.mark.parametrize(
        "text", ["http://other.test/acme/x", "hf://x", "http://hub.test/acme", "http://[::1", "ftp://acme/x"]
    )
    def test_of_something_else(self, monkeypatch, text):
        monkeypatch.setenv("HF_ENDPOINT", "http://hub.test")
        with pytest.raises(InvalidRequestError):
            reference(text)

    def test_name(self):
        assert name_of("bartowski/Qwen3-8B-GGUF") == "qwen3-8b"
        assert name_of("BAAI/bge-m3") == "bge-m3"

    @cases(
        ("file", "quantisation"),
        [
            ("Qwen3-8B-Q4_K_M.gguf", "q4_k_m"),
            ("model.Q4_0.gguf", "Q4_0"),
            ("x-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
            ("BF16/x-BF16-00001-of-00002.gguf", "BF16"),
            ("IQ2_XXS/x-00001-of-00003.gguf", "IQ2_XXS"),
            ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
            ("x.gguf", "x.gguf"),
            ("X.Q4_K_M.GGUF", "Q4_K_M"),
        ],
    )
    def test_quantisation(self, file, quantisation):
        assert is_named(file, quantisation)
        assert not is_named(file, "Q5_K_M")


class TestWellKnownNames:
    """What Ollama calls a model stands for a repository of the hub, and is the name that its clients will ask for."""

    @cases(
        ("text", "wanted"),
        [
            ("llama3.2", Reference("bartowski/Llama-3.2-3B-Instruct-GGUF", name="llama3.2")),
            ("Llama3.2:latest", Reference("bartowski/Llama-3.2-3B-Instruct-GGUF", name="llama3.2")),
            ("qwen3:4b", Reference("Qwen/Qwen3-4B-GGUF", name="qwen3:4b")),
            (
                "llama3.2:1b-instruct-q8_0",
                Reference("bartowski/Llama-3.2-1B-Instruct-GGUF", "q8_0", name="llama3.2:1b-instruct-q8_0"),
            ),
            ("qwen3:5b", None),
            ("unheard-of", None),
        ],
    )
    def test_reference(self, text, wanted):
        assert reference(text) == wanted

    def test_all_of_the_list(self):
        names = _well_known_names()
        assert len(names) > 40
        for name, repo in names.items():
            assert reference(name) == Reference(repo, name=name)
            assert is_name(name)
            assert reference(repo) == Reference(repo)
