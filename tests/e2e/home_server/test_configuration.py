"""config/examples/home-16gb: valid, complete, and closed until its keys are made."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from supervisor.catalog import load
from supervisor.catalog.keys import Scope, load_keys
from supervisor.errors import ConfigError
from tests.e2e.cli.pull.conftest import Pull
from tests.e2e.home_server.conftest import FOLDER, filled_in
from tests.support.fake_hub import Hub, Repo
from tests.unit.runtimes.llama_server.test_estimate import write_head

GB = 10**9
SMALL_FILES = dict.fromkeys(
    (
        *("config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "merges.txt"),
        *("conds.pt", "s3gen.pt", "ve.pt", "s3gen.safetensors", "ve.safetensors", "s3gen_meanflow.safetensors"),
        *("grapheme_mtl_merged_expanded_v1.json", "Cangjie5_TC.json"),
    ),
    b"{}",
)


QWEN = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 32,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248_320,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
    "dtype": "bfloat16",
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}
COHERE = {"model_type": "cohere_asr", "d_model": 1024, "decoder_layers": 8, "vocab_size": 16_384, "dtype": "bfloat16"}
EYES = {"vision_config": {"hidden_size": 1152, "intermediate_size": 4304}, "image_token_id": 1}
"""Shapes as their config.json has them."""


def safetensors(folder: Path, config: dict[str, object] | None = None, name: str = "model", **sizes: float) -> None:
    """A folder of a model that takes no disk: its config.json, and one tensor of each type, by GB."""
    tensors, at = {}, 0
    for kind, size in sizes.items():
        count = int(size * GB / (2 if kind == "BF16" else 4 if kind == "F32" else 1))
        end = at + int(size * GB) // 4 * 4
        tensors[kind] = {"dtype": kind, "shape": [count], "data_offsets": [at, end]}
        at = end
    head = json.dumps(tensors).encode()
    path = folder / f"{name}.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(path, 8 + len(head) + at)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))


def qwen(folder: Path, width: int, inner: int, *, tied: bool = False, **sizes: float) -> None:
    shape = {"hidden_size": width, "intermediate_size": inner, "tie_word_embeddings": tied}
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "dtype": "bfloat16"}
    safetensors(folder, config | {"text_config": QWEN | shape} | EYES, **sizes)
    (folder / "preprocessor_config.json").write_text('{"merge_size": 2}')


def qwen_gguf(folder: Path) -> None:
    """9.8 GB in 8 bits, and eyes of 0.9 GB in 16."""
    shape = {"block_count": 32, "embedding_length": 4096, "feed_forward_length": 12288, "context_length": 262_144}
    heads = {"head_count": 16, "head_count_kv": 4, "key_length": 256, "value_length": 256}
    states = {"state_size": 128, "inner_size": 4096, "conv_kernel": 4, "group_count": 16}
    keys = shape | {f"attention.{key}": value for key, value in heads.items()}
    keys |= {f"ssm.{key}": value for key, value in states.items()} | {
        "full_attention_interval": 4,
        "vocab_size": 248_320,
    }
    for name, architecture, values, size in (
        ("Qwen3.5-9B-Uncensored-HauhauCS-Aggressive-Q8_0.gguf", "qwen35", keys, 9.8),
        ("mmproj.gguf", "clip", {}, 0.92),
    ):
        write_head(folder / name, architecture, values)
        os.truncate(folder / name, int(size * GB))


def chatterbox(folder: Path, tokens: str, vocoder: str, tokens_gb: float) -> None:
    """The model of tokens, the vocoder, and the voice encoder, all in 32 bits."""
    for name, size in ((tokens, tokens_gb), (vocoder, 1.06), ("ve.pt", 0.006), ("ve.safetensors", 0.006)):
        if name.endswith(".pt"):
            (folder / name).touch()
            os.truncate(folder / name, int(size * GB))
        else:
            safetensors(folder, name=name.removesuffix(".safetensors"), F32=size)


PUBLISHED = {
    "qwen3.5-9b-fp8": lambda folder: qwen(folder, 4096, 12288, F8_E4M3=6.9, BF16=5.0),
    "qwen3.5-9b-fp8-uncensored": qwen_gguf,
    "qwen3.5-4b": lambda folder: qwen(folder, 2560, 9216, tied=True, BF16=9.32),
    "gpt-oss-20b": lambda folder: safetensors(folder, GPT_OSS, U8=11.2, BF16=2.56),
    "cohere-transcribe": lambda folder: safetensors(folder, COHERE, BF16=4.08),
    "chatterbox-turbo": lambda folder: chatterbox(
        folder, "t3_turbo_v1.safetensors", "s3gen_meanflow.safetensors", 1.92
    ),
    "chatterbox-multilingual": lambda folder: chatterbox(folder, "t3_mtl23ls_v2.safetensors", "s3gen.pt", 2.14),
    "chatterbox": lambda folder: chatterbox(folder, "t3_cfg.safetensors", "s3gen.safetensors", 2.13),
}
"""The checkpoints' shapes and sizes; those of 20B are alike. Whole Chatterbox workers were measured at 3.6 to 3.7 GB."""


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
        assert heard + spoken + sizes["qwen3.5-4b"] == 14464
        larger = [size for name, size in sizes.items() if "9b" in name or "20b" in name]
        assert min(larger) + min(heard, spoken) > 16384 - 512 >= max(larger)

    @pytest.mark.parametrize("name", [*PUBLISHED])
    def test_memory_is_that_of_the_checkpoints(self, catalog, tmp_path, name):
        """What the runtime computes from files of the published shapes and sizes, and little more."""
        model = catalog.models[name]
        PUBLISHED[name](tmp_path)
        path = tmp_path / model.config.path.name if model.adapter.name == "llama_server" else tmp_path
        mmproj = {"mmproj": tmp_path / "mmproj.gguf"} if model.adapter.name == "llama_server" else {}
        config = model.config.model_copy(update={"path": path, "vram_mib": None, **mmproj})
        computed = model.adapter.estimate(config).mib
        assert computed <= model.config.vram_mib <= computed * 1.1

    def test_every_model_has_figures(self, catalog):
        assert {name.removesuffix("-uncensored") for name in catalog.models} <= {*PUBLISHED, "gpt-oss-20b"}

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

    def test_seventy_gigabytes(self, tmp_path):
        with Hub() as hub:
            for repo, files, other in (
                ("lovedheart/Qwen3.5-9B-FP8", {"model.safetensors": 11.9}, {}),
                ("Qwen/Qwen3.5-4B", {"model.safetensors": 9.3}, {}),
                ("openai/gpt-oss-20b", {"model-00000-of-00002.safetensors": 13.8}, {"original/model.safetensors": 13}),
                ("aoxo/gpt-oss-20b-uncensored", {"model.safetensors": 13.8}, {}),
                ("CohereLabs/cohere-transcribe-03-2026", {"model.safetensors": 4.1}, {}),
                (
                    "HauhauCS/Qwen3.5-9B-Uncensored-HauhauCS-Aggressive",
                    {
                        "Qwen3.5-9B-Uncensored-HauhauCS-Aggressive-Q8_0.gguf": 9.8,
                        "mmproj-Qwen3.5-9B-Uncensored-HauhauCS-Aggressive-BF16.gguf": 0.9,
                    },
                    {"Qwen3.5-9B-Uncensored-HauhauCS-Aggressive-Q4_K_M.gguf": 6},
                ),
                (
                    "ResembleAI/chatterbox",
                    {
                        "t3_cfg.safetensors": 2.1,
                        "t3_mtl23ls_v2.safetensors": 2.1,
                        "s3gen.pt": 1.1,
                        "s3gen.safetensors": 1.1,
                    },
                    {"t3_23lang.safetensors": 2},
                ),
                (
                    "ResembleAI/chatterbox-turbo",
                    {"t3_turbo_v1.safetensors": 1.9, "s3gen_meanflow.safetensors": 1.1},
                    {},
                ),
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
        assert sum(row["size_bytes"] for row in rows) == pytest.approx(73 * GB, rel=0.01)
        assert [row["models"] for row in rows if row["gated"]] == [["cohere-transcribe"]]
        assert "GB total" in told or "GiB total" in told


def test_the_folder_is_complete(tmp_path):
    """Copied as it is and with its keys made, only the models' files are missing."""
    copied = shutil.copytree(FOLDER, tmp_path / "llmux")
    path = copied / "llmux.yaml"
    path.write_text(path.read_text() + f"  models_dir: {tmp_path / 'models'}\n")
    told = [str(trouble) for model in load(path).models.values() for trouble in model.troubles]
    names = [found[1] for trouble in told if (found := re.search(r"; get it: llmux pull (\S+)$", trouble))]
    assert len(names) == len(told), told
    assert len(set(names)) == 9
