"""The memory settings and the estimate of a vLLM worker; tests/e2e/runtimes/test_vllm.py compares these with a real worker."""

from __future__ import annotations

import pytest

from runtimes.adapters.vllm import memory
from runtimes.base import ModelUnusableError
from runtimes.sizing import Room
from runtimes.vllm_serve.adapter import VllmServeAdapter
from tests.support import hf_folder

ADAPTER = VllmServeAdapter()
MIB = memory.MIB
TOKEN = 2 * 2 * 2 * 64 * 2  # layers, keys and values, heads, values of a head, bytes


@pytest.fixture
def folder(tmp_path):
    return hf_folder.write(tmp_path / "model", size=300 * MIB)


@pytest.fixture
def config(folder):
    return lambda **keys: ADAPTER.config(**{"runtime": "vllm_serve", "path": str(folder), **keys})


def terms(config):
    return dict(memory.plan(config).terms)


class TestCache:
    """The cache is given in bytes: as configured, the rest of vram_mib, or enough for one longest request."""

    def test_as_configured(self, config):
        plan = memory.plan(config(kv_cache_memory_bytes=1 << 30, vram_mib=9000))
        assert plan.cache_bytes == 1 << 30
        assert dict(plan.terms)["KV cache"] == 1 << 30

    def test_what_vram_mib_leaves(self, config):
        plan = memory.plan(config(vram_mib=9000))
        assert plan.total // MIB == 9000
        assert plan.cache_bytes == 9000 * MIB - (plan.total - plan.cache_bytes)

    def test_vram_mib_that_leaves_too_little(self, config):
        least = memory.plan(config()).total // MIB
        assert memory.plan(config(vram_mib=least + 1)).cache_bytes > 0
        with pytest.raises(ModelUnusableError, match=r"vram_mib: \d+ leaves \d+ MiB for the KV cache"):
            memory.plan(config(vram_mib=least - 1))

    @pytest.mark.parametrize(
        ("keys", "needed"),
        [
            ({}, 2048 * TOKEN),
            ({"max_model_len": 100}, 100 * TOKEN),
            ({"kv_cache_dtype": "fp8"}, 2048 * TOKEN // 2),
            ({"dtype": "float32"}, 2048 * TOKEN * 2),
            ({"tensor_parallel_size": 2}, 1024 * TOKEN),
        ],
    )
    def test_one_longest_request(self, config, keys, needed):
        assert memory.plan(config(**keys)).cache_bytes == int(needed * memory.ROUNDING) + memory.MIN_CACHE

    def test_the_usual_context_is_the_models_own_up_to_8192(self, config, folder):
        assert memory.plan(config()).context == 2048
        hf_folder.write(folder, {"max_position_embeddings": 1 << 18})
        assert memory.plan(config()).context == 8192
        assert memory.plan(config(max_model_len=20000)).context == 20000

    def test_windows_and_states(self, config, folder):
        hf_folder.write(folder, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128})
        needed = TOKEN // 2 * (8192 + 128 + 1024)
        plan = memory.plan(config(max_num_batched_tokens=1024, max_model_len=8192))
        assert plan.cache_bytes == int(needed * memory.ROUNDING) + memory.MIN_CACHE
        linear = {"linear_num_value_heads": 4, "linear_value_head_dim": 64, "linear_key_head_dim": 64}
        linear |= {"linear_num_key_heads": 2, "linear_conv_kernel_dim": 4}
        hf_folder.write(folder, {"layer_types": ["linear_attention", "full_attention"], **linear})
        few, many = (memory.plan(config(max_num_seqs=number)).cache_bytes for number in (1, 11))
        state = (2 * 2 * 64 + 4 * 64) * 4 * 2 + 4 * 4 * 64 * 64
        assert many - few == pytest.approx(10 * state * memory.ROUNDING, abs=2)

    def test_encoders_keep_nothing(self, config, folder):
        hf_folder.write(folder, {"architectures": ["BertModel"], "model_type": "bert"})
        assert "KV cache" not in terms(config())


class TestEstimate:
    """All parts are counted, each with its name."""

    def test_weights_in_the_type_they_are_loaded_in(self, config):
        assert terms(config())["weights"] == 300 * MIB
        assert terms(config(dtype="float32"))["weights"] == 600 * MIB
        assert terms(config(cpu_offload_gb=0.125))["weights"] == (300 - 128) * MIB
        assert "weights" not in terms(config(cpu_offload_gb=1.0))

    def test_a_float32_model_is_halved(self, config, folder):
        hf_folder.write(folder, {"dtype": "float32"}, size=300 * MIB)
        assert memory.dtype(config(), memory.description(config())) == "bfloat16"

    def test_a_draft_model(self, config, tmp_path):
        draft = hf_folder.write(tmp_path / "draft", size=50 * MIB)
        keys = {"speculative_method": "draft_model", "num_speculative_tokens": 4}
        assert terms(config(**keys, speculative_model=str(draft)))["draft"] == 50 * MIB
        assert "draft" not in terms(config(**keys, speculative_model="org/not-here"))

    def test_steps_and_pictures_take_activations(self, config, folder):
        small, large = (terms(config(max_num_batched_tokens=n))["activations"] for n in (1024, 8192))
        assert large > 4 * small
        eyes = {"hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "patch_size": 16}
        hf_folder.write(folder, {"text_config": hf_folder.TINY, "vision_config": eyes})
        few, many = (terms(config(max_pixels=n))["activations"] for n in (256 * 256, 4096 * 4096))
        assert many - few == pytest.approx((4096**2 - 256**2) / 256 * 2 * (2 * 1152 + 3 * 4304), rel=0.01)

    def test_in_words(self, config):
        estimate = ADAPTER.estimate(config())
        assert estimate.source == "computed"
        assert "weights 300 + KV cache 19 + activations" in estimate.detail
        assert estimate.detail.endswith("(2048 tokens of context, 8 requests at once)")
        assert estimate.mib == pytest.approx(memory.plan(config()).total / MIB, abs=5)

    def test_nothing_is_known(self, config):
        assert ADAPTER.estimate(config(path="/no/such/model")) is None
        assert ADAPTER.estimate(config(path=None, model="org/none", kv_cache_memory_bytes=1 << 30)) is None

    def test_what_decides_the_memory_is_in_its_definition(self, config, folder):
        def definition(**keys):
            return ADAPTER.memory_definition(config(**keys))

        plain = definition()
        assert plain == definition(priority=3)
        assert plain != definition(vram_mib=9000)
        assert plain != definition(max_model_len=100)
        hf_folder.write(folder, size=400 * MIB)
        assert plain != definition()


class TestContext:
    """Without a configured context, the largest that fits the device."""

    @pytest.fixture
    def config(self, tmp_path):
        shape = {"max_position_embeddings": 131_072, "num_hidden_layers": 32, "num_key_value_heads": 16}
        folder = hf_folder.write(tmp_path / "long", shape, size=300 * MIB)
        return lambda **keys: ADAPTER.config(**{"runtime": "vllm_serve", "path": str(folder), **keys})

    def test_by_the_device(self, config):
        for_agents = ADAPTER.estimate(config(max_model_len=32_768)).mib
        chosen, sizing = ADAPTER.sized(config(), Room(for_agents * 10 // 9 + 1, "gpu0"))
        assert (chosen.max_model_len, sizing.context, sizing.trained) == (32_768, 32_768, 131_072)
        assert ADAPTER.sized(config(), Room(for_agents, "gpu0"))[0].max_model_len == 16_384
        assert ADAPTER.sized(config(), Room(80_000, "gpu0"))[0].max_model_len == 131_072

    def test_vram_mib_is_filled(self, config):
        given = ADAPTER.estimate(config(max_model_len=16_384)).mib
        chosen, _ = ADAPTER.sized(config(vram_mib=given), Room(given, "vram_mib", is_own=True))
        assert chosen.max_model_len == 16_384
        assert memory.plan(chosen).total // MIB <= given

    def test_what_is_configured_wins(self, config):
        chosen, sizing = ADAPTER.sized(config(max_model_len=100), Room(80_000, "gpu0"))
        assert (chosen.max_model_len, sizing.why) == (100, "as configured")

    def test_a_model_that_is_not_here(self):
        chosen, sizing = ADAPTER.sized(ADAPTER.config(runtime="vllm_serve", model="a/b"), Room(80_000, "gpu0"))
        assert (chosen.max_model_len, sizing) == (None, None)
