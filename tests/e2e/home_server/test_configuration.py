"""config/examples/home-16gb: valid, complete, and closed until its keys are made."""

from __future__ import annotations

import re
import shutil

import pytest
import yaml

from supervisor.catalog import load
from supervisor.catalog.keys import Scope, load_keys
from supervisor.errors import ConfigError
from tests.e2e.cli.pull.conftest import Pull
from tests.e2e.home_server.conftest import FOLDER, filled_in
from tests.support.fake_hub import Hub, Repo

GB = 10**9
SMALL_FILES = dict.fromkeys(
    (
        *("config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "merges.txt"),
        *("conds.pt", "s3gen.pt", "ve.pt", "s3gen.safetensors", "ve.safetensors", "s3gen_meanflow.safetensors"),
        *("grapheme_mtl_merged_expanded_v1.json", "Cangjie5_TC.json"),
    ),
    b"{}",
)


@pytest.fixture(scope="module")
def catalog():
    return load(FOLDER / "llmux.yaml", check_files=False)


class TestModels:
    """Nine models behind sixteen names."""

    def test_names(self, catalog):
        assert [(entry.name, str(catalog.virtual[entry.name].model.id)) for entry in catalog.listing()] == [
            ("Qwen3.5-9B-FP8-Thinking", "qwen3.5-9b-fp8"),
            ("Qwen3.5-9B-FP8-Instruct", "qwen3.5-9b-fp8"),
            ("Qwen3.5-9B-FP8-Uncensored-Thinking", "qwen3.5-9b-fp8-uncensored"),
            ("Qwen3.5-9B-FP8-Uncensored-Instruct", "qwen3.5-9b-fp8-uncensored"),
            ("Qwen3.5-4B-Thinking", "qwen3.5-4b"),
            ("Qwen3.5-4B-Instruct", "qwen3.5-4b"),
            ("GPT-OSS-20B-Low", "gpt-oss-20b"),
            ("GPT-OSS-20B-Medium", "gpt-oss-20b"),
            ("GPT-OSS-20B-High", "gpt-oss-20b"),
            ("GPT-OSS-20B-Uncensored-Low", "gpt-oss-20b-uncensored"),
            ("GPT-OSS-20B-Uncensored-Medium", "gpt-oss-20b-uncensored"),
            ("GPT-OSS-20B-Uncensored-High", "gpt-oss-20b-uncensored"),
            ("cohere-transcribe", "cohere-transcribe"),
            ("Chatterbox-Turbo", "chatterbox-turbo"),
            ("Chatterbox-Multilingual", "chatterbox-multilingual"),
            ("Chatterbox", "chatterbox"),
        ]

    def test_what_fits_together(self, catalog):
        """The sums of the file's head: the largest sets that max_loaded allows, on 16384 MiB less the margin."""
        sizes = {str(model.id): model.config.vram_mib for model in catalog.models.values()}
        heard, spoken = sizes["cohere-transcribe"], sizes["chatterbox"]
        assert {spoken} == {size for name, size in sizes.items() if name.startswith("chatterbox")}
        assert [heard + spoken + sizes[name] for name in ("qwen3.5-4b", "qwen3.5-9b-fp8")] == [10240, 15360]
        assert sizes["gpt-oss-20b"] + spoken <= 16384 - 512 < sizes["gpt-oss-20b"] + heard

    def test_everything_can_be_pulled(self, catalog):
        assert all(model.config.source is not None for model in catalog.models.values())


class TestKeys:
    """A key for each client, which somebody has to make first."""

    def test_placeholders_are_no_keys(self):
        with pytest.raises(ConfigError, match="could be guessed") as told:
            load_keys(FOLDER / "api_keys.yaml")
        assert str(told.value).count("could be guessed") == 3

    def test_made(self, tmp_path):
        path = tmp_path / "api_keys.yaml"
        path.write_text(filled_in((FOLDER / "api_keys.yaml").read_text()))
        path.chmod(0o600)
        keyring = load_keys(path)
        assert [key.name for key in keyring.keys] == ["Open WebUI", "Remote Whisper clients", "OpenCode"]
        assert {key.scopes for key in keyring.keys} == {frozenset({Scope.INFERENCE})}
        assert keyring.warnings == ()


class Large(bytes):
    """A file of which only the length is large."""

    length = 0

    def __len__(self) -> int:
        return self.length


def large(gigabytes: float) -> Large:
    found = Large(b"x")
    found.length = int(gigabytes * GB)
    return found


class TestPull:
    """What `llmux pull --dry-run` says of it, with files as large as theirs."""

    def test_sixty_gigabytes(self, tmp_path):
        with Hub() as hub:
            for repo, files, other in (
                ("lovedheart/Qwen3.5-9B-FP8", {"model.safetensors": 9}, {}),
                ("Qwen/Qwen3.5-4B", {"model.safetensors": 8}, {}),
                ("openai/gpt-oss-20b", {"model-00000-of-00002.safetensors": 13}, {"original/model.safetensors": 13}),
                ("aoxo/gpt-oss-20b-uncensored", {"model.safetensors": 13}, {}),
                ("CohereLabs/cohere-transcribe-03-2026", {"model.safetensors": 4}, {}),
                (
                    "HauhauCS/Qwen3.5-9B-Uncensored-HauhauCS-Aggressive",
                    {
                        "Qwen3.5-9B-Uncensored-HauhauCS-Aggressive-Q8_0.gguf": 9,
                        "mmproj-Qwen3.5-9B-Uncensored-HauhauCS-Aggressive-BF16.gguf": 1,
                    },
                    {"Qwen3.5-9B-Uncensored-HauhauCS-Aggressive-Q4_K_M.gguf": 6},
                ),
                (
                    "ResembleAI/chatterbox",
                    {"t3_cfg.safetensors": 0.5, "t3_mtl23ls_v2.safetensors": 0.5},
                    {"t3_23lang.safetensors": 2},
                ),
                ("ResembleAI/chatterbox-turbo", {"t3_turbo_v1.safetensors": 1}, {}),
            ):
                sized = {name: large(size) for name, size in (files | other).items()}
                hub.repos[repo] = Repo({**SMALL_FILES, **sized}, large=frozenset(sized), gated="cohere" in repo)
            pull = Pull(tmp_path, hub)
            config = yaml.safe_load((FOLDER / "llmux.yaml").read_text())
            pull.models, pull.virtual = config["models"], config["virtual_models"]
            rows = pull.rows("--dry-run")
            told = pull("--dry-run").stdout
        assert {row["problem"] for row in rows} == {None}
        assert sorted(name for row in rows for name in row["models"]) == sorted(config["models"])
        assert sum(row["size_bytes"] for row in rows) == pytest.approx(59 * GB, rel=0.01)
        assert [row["models"] for row in rows if row["gated"]] == [["cohere-transcribe"]]
        assert "in all" in told


def test_the_folder_is_complete(tmp_path):
    """Copied as it is and with its keys made, only the models' files are missing."""
    copied = shutil.copytree(FOLDER, tmp_path / "llmux")
    path = copied / "llmux.yaml"
    path.write_text(path.read_text() + f"  models_dir: {tmp_path / 'models'}\n")
    with pytest.raises(ConfigError) as told:
        load(path)
    names = [found[1] for problem in told.value.detail if (found := re.search(r"; get it: llmux pull (\S+)$", problem))]
    assert len(names) == len(told.value.detail), told.value.detail
    assert len(set(names)) == 9
