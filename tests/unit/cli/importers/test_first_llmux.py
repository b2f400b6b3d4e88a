"""Configurations of the first llmux: what they become, and what is told."""

from __future__ import annotations

import pytest

from supervisor.catalog.document.yaml_writer import to_yaml
from supervisor.catalog.keys import load_keys
from supervisor.cli.importers import first_llmux
from supervisor.errors import ConfigError
from supervisor.host.store.files import create
from tests.support.cases import cases
from tests.support.importing import notes


def nowhere(_name):
    return None


def imported(models, virtual=None, keys=None, find=nowhere):
    root = {"physical_models": models, "virtual_models": virtual or {}}
    draft = first_llmux.convert(root, {"api_keys": keys or []}, find)
    draft.settle()
    return draft


HUB = {"type": "llm", "backend": "transformers", "model_id": "org/m", "estimated_vram_gb": 9}


class TestModels:
    """Each backend becomes the runtime that does the same."""

    def test_an_estimate_is_no_measurement(self):
        draft = imported({"m": HUB})
        assert draft.models["m"] == {"runtime": "transformers", "source": {"repo": "org/m"}}
        assert "Was estimated at 9 GB. Set vram_mib only to what was measured." in draft.text(())

    def test_what_lies_beside_the_configuration_is_used(self, tmp_path):
        for name in ("org/m", "vox"):
            (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / "a.gguf").touch()
        find = first_llmux.models_folder(tmp_path / "config")
        gguf = {"backend": "llamacpp", "model_file": "a.gguf", "mmproj_file": "gone.gguf"}
        draft = imported(
            {"m": HUB, "n": HUB | {"model_id": "else/vox"}, "g": gguf, "h": HUB | {"model_id": "a/b"}}, find=find
        )
        assert [draft.models[name].get("path") for name in ("m", "n", "g", "h")] == [
            str(tmp_path / "models" / "org/m"),
            str(tmp_path / "models" / "vox"),
            str(tmp_path / "models" / "a.gguf"),
            None,
        ]
        assert draft.models["g"]["mmproj"] == "gone.gguf"
        assert any(note.startswith("models.g.mmproj: gone.gguf starts from the folder") for note in notes(draft))

    @pytest.mark.parametrize("below", ["models", "models/hub", "cache"])
    def test_what_lies_in_a_cache_of_the_hub(self, tmp_path, monkeypatch, below):
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        kept = tmp_path / below / "models--org--m"
        snapshot = kept / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text("abc")
        (snapshot / "a.gguf").touch()
        find = first_llmux.models_folder(tmp_path / "config")
        draft = imported({"m": HUB, "g": {"backend": "llamacpp", "model_file": "a.gguf"}}, find=find)
        assert draft.models["m"]["path"] == str(snapshot)
        assert draft.models["g"]["path"] == str(snapshot / "a.gguf")

    @cases(
        ("repo", "estimate", "told"),
        [
            ("Qwen/Qwen3.5-4B", 4, "bitsandbytes-4bit"),
            ("Qwen/Qwen3.5-4B", 5, "bitsandbytes-8bit"),
            ("Qwen/Qwen3.5-4B", 9, None),
            ("org/Qwen3.5-9B-FP8", 9, None),
            ("openai/gpt-oss-20b", 13, None),
            ("org/m", 4, None),
        ],
    )
    def test_weights_that_were_thought_narrower(self, repo, estimate, told):
        draft = imported({"m": HUB | {"model_id": repo, "estimated_vram_gb": estimate}})
        found = [note for note in notes(draft) if note.startswith("physical_models.m.")]
        assert [told in note for note in found] == ([] if told is None else [True])

    def test_the_files_themselves_say_how_wide_they_are(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(12_000_000_000)
        draft = imported({"m": HUB}, find=lambda _: tmp_path)
        assert any("about 12 GB; quantization: bitsandbytes-8bit" in note for note in notes(draft))
        (tmp_path / "config.json").write_text('{"quantization_config": {}}')
        assert not any("bits wide" in note for note in notes(imported({"m": HUB}, find=lambda _: tmp_path)))

    def test_fields_of_a_request(self):
        params = {"enable_thinking": False, "system_prompt_prefix": "Be brief.", "temperature": 0.2}
        draft = imported({"m": HUB}, {"v": {"physical": "m", "params": params, "note": 1}, "w": {"physical": "gone"}})
        assert draft.virtual_models == {
            "v": {
                "model": "m",
                "enable_thinking": False,
                "system_prompt_prefix": "Be brief.",
                "defaults": {"temperature": 0.2},
            }
        }
        assert "virtual_models.w: there is no model gone" in notes(draft)
        assert "virtual_models.v.note: llmux has nothing like it" in notes(draft)

    def test_what_has_no_runtime_is_told(self):
        draft = imported({"m": HUB, "x": {"backend": "ollama"}, "y": 3})
        assert list(draft.models) == ["m"]
        assert notes(draft)[:2] == [
            'physical_models.x: there is no runtime for backend "ollama"',
            "physical_models.y: expected a mapping",
        ]

    def test_no_models(self):
        with pytest.raises(ConfigError, match="there are no models"):
            imported({})


class TestKeys:
    """Only digests are written, under the same names."""

    def test_digests(self):
        secret = "sk-llmux-0123456789"
        draft = imported({"m": HUB}, keys=[{"key": secret, "name": "Mine"}, {"key": "short", "name": "x"}, 3])
        (key,) = draft.keys
        assert (key["name"], key["scopes"]) == ("Mine", ["inference"])
        assert secret not in str(draft)
        assert [note for note in notes(draft) if note.startswith("api_keys[")] == [
            f"api_keys[{n}]: the key {why}; make a new one with: llmux keys add NAME"
            for n, why in ((1, "is shorter than 16 characters and could be guessed"), (2, "is no text"))
        ]
        assert any("llmux keys add NAME --scope admin" in note for note in notes(draft))

    def test_placeholders_are_no_keys(self):
        draft = imported({"m": HUB}, keys=[{"key": "<your-own-key-goes-here>", "name": "web"}])
        assert not draft.keys
        assert any("api_keys[0]: the key is a placeholder" in note for note in notes(draft))

    def test_names_and_keys_are_there_once(self, tmp_path):
        """A file of keys with two of a name, or one key twice, would be a mistake."""
        told = [{"key": f"sk-llmux-012345678{n}", "name": "web"} for n in (1, 2, 2)]
        draft = imported({"m": HUB}, keys=told)
        path = tmp_path / "api_keys.yaml"
        create(path, to_yaml({"keys": list(draft.keys)}))
        assert [key.name for key in load_keys(path).keys] == ["web", "web 2"]
        assert "api_keys[2]: the same key is there already" in notes(draft)
