"""The formula's terms against known models."""

from __future__ import annotations

import gguf as reference

from runtimes.llama_server.adapter import LlamaServerAdapter
from tests.support import tiny

ADAPTER = LlamaServerAdapter()
MIB = 1 << 20


def config(**keys):
    return ADAPTER.config(runtime="llama_server", program="embedded", **keys)


def write_head(path, architecture, keys):
    """A file that has only its metadata, of a model too large to be here."""
    writer = reference.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        else:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def cache_mib(path, **keys) -> int:
    detail = ADAPTER.estimate(config(path=str(path), **keys)).detail
    return int(detail.partition("KV cache ")[2].split()[0])


LLAMA_8B = {
    "block_count": 32,
    "embedding_length": 4096,
    "feed_forward_length": 14336,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "context_length": 131072,
}


class TestCache:
    """KV cache sizes that llama.cpp reports for known models."""

    def test_grouped_queries(self, tmp_path):
        write_head(tmp_path / "m", "llama", LLAMA_8B)
        assert cache_mib(tmp_path / "m", n_ctx=8192) == 1024
        assert cache_mib(tmp_path / "m", n_ctx=8192, cache_type_k="q8_0", cache_type_v="q8_0") == 544
        assert cache_mib(tmp_path / "m", n_ctx=0) == 16384

    def test_slots_share_the_context_or_split_it(self, tmp_path):
        write_head(tmp_path / "m", "llama", LLAMA_8B)
        assert cache_mib(tmp_path / "m", n_ctx=8192, parallel=16) == 1024
        assert cache_mib(tmp_path / "m", n_ctx=8192, parallel=16, kv_unified=False) == 1024
        assert cache_mib(tmp_path / "m", n_ctx=8192, parallel=3, kv_unified=False) == 1056  # 2816 cells each

    def test_sliding_windows(self, tmp_path):
        gemma = {
            "block_count": 6,
            "embedding_length": 2560,
            "attention.head_count": 8,
            "attention.head_count_kv": 4,
            "attention.key_length": 256,
            "attention.value_length": 256,
            "attention.sliding_window": 1024,
        }
        write_head(tmp_path / "m", "gemma3", gemma)
        # 4 KiB a cell and layer: one layer of 32768 cells, five of 1024 * 1 slot + 512 in a batch
        assert cache_mib(tmp_path / "m", n_ctx=32768, parallel=1) == 128 + 5 * 6
        write_head(tmp_path / "n", "gemma4", {**gemma, "attention.sliding_window_pattern": [True] * 3 + [False] * 3})
        assert cache_mib(tmp_path / "n", n_ctx=32768, parallel=1) == 3 * 128 + 3 * 6

    def test_hybrids_keep_a_state_instead(self, tmp_path):
        hybrid = {
            "block_count": 8,
            "embedding_length": 2048,
            "attention.head_count": 16,
            "attention.head_count_kv": 2,
            "attention.key_length": 256,
            "attention.value_length": 256,
            "full_attention_interval": 4,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 16,
            "ssm.inner_size": 4096,
        }
        write_head(tmp_path / "m", "qwen3next", hybrid)
        state = 4 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096)
        expected = 2 * 32768 * 2 * 2 * 256 * 2 + 6 * state
        assert cache_mib(tmp_path / "m", n_ctx=32768, parallel=1) == -(-expected // MIB)

    def test_latent_attention_keeps_no_values(self, tmp_path):
        keys = {
            "block_count": 61,
            "embedding_length": 7168,
            "attention.head_count": 128,
            "attention.head_count_kv": 1,
            "attention.key_length": 576,
            "attention.value_length": 512,
            "attention.kv_lora_rank": 512,
        }
        write_head(tmp_path / "m", "deepseek2", keys)
        assert cache_mib(tmp_path / "m", n_ctx=4096) == -(-61 * 4096 * 576 * 2 // MIB)

    def test_layers_that_stay_on_the_host_dont_count(self, tmp_path):
        write_head(tmp_path / "m", "llama", LLAMA_8B)
        assert cache_mib(tmp_path / "m", n_ctx=8192, n_gpu_layers=16) == 512
        assert cache_mib(tmp_path / "m", n_ctx=8192, n_gpu_layers=40) == 1024


class TestTerms:
    """The detail names every term; a file that can't be read has no estimate."""

    def test_detail(self):
        path = str(tiny.model())
        text = ADAPTER.estimate(config(path=path, draft_model=path, mmproj=path, cache_ram_mib=64)).detail
        for term in (
            "model weights 5",
            "draft weights 5",
            "KV cache",
            "compute",
            "mmproj 10",
            "prompt cache 64",
            "4 slots",
        ):
            assert term in text

    def test_no_estimate_without_a_model(self):
        assert ADAPTER.estimate(config(path="/no/such.gguf")) is None
        assert ADAPTER.estimate(config(path=__file__)) is None
