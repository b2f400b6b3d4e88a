"""Settings of llm-pool: what they become, and what is told."""

from __future__ import annotations

import pytest

from supervisor.cli.importers import llm_pool
from tests.support.importing import notes


class TestLlmPool:
    """settings.json with local.json over it."""

    def test_merge(self):
        assert llm_pool.merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2]}) == {
            "a": {"b": 3, "c": 2},
            "d": [2],
        }

    def test_shared_stop_words_come_along(self):
        models = {"a": {"backend": "llama_server", "model_path": "/a.gguf"}}
        draft = llm_pool.convert({"engine": {"decoding": {"stop": ["</s>"]}, "models": models}})
        draft.settle()
        assert draft.virtual_models["a"]["defaults"] == {"stop": ["</s>"]}
        assert notes(draft) == []

    def test_prompt_formats_stay(self):
        """As long as they are known; remotes have their own."""
        gguf = {"backend": "llama_server", "model_path": "/a.gguf"}
        remote = {"backend": "openai_remote", "remote_base_url": "https://a.example/v1", "remote_model": "m"}
        models = {
            "a": {**gguf, "prompt_format": "translategemma_template"},
            "b": {**gguf, "prompt_format": "unheard_of"},
            "c": {**remote, "prompt_format": "qwen3_template"},
        }
        draft = llm_pool.convert({"engine": {"models": models}})
        draft.settle()
        assert [model.get("prompt_format") for model in draft.models.values()] == [
            "translategemma_template",
            None,
            None,
        ]
        assert any(note.startswith("models.b.prompt_format: ") for note in notes(draft))
        assert "engine.models.c.prompt_format: prompts are written where the model runs" in notes(draft)

    def test_ct2_models(self):
        """llmux chooses a GPU where none is named; what their requests have beyond OpenAI's is their own."""
        common = {"backend": "ct2", "model_path": "/a", "prompt_format": "generic"}
        models = {
            "a": {**common, "device": "cuda", "compute_type": "int8_float16"},
            "b": {**common, "device": "cuda:1"},
            "c": {**common, "device": "cpu", "modalities": ["text"], "gguf_n_ctx": 1},
        }
        decoding = {"beam_size": 4, "repetition_penalty": 1.2, "min_p": 0.1}
        draft = llm_pool.convert({"engine": {"decoding": decoding, "models": models}})
        draft.settle()
        ours = {"runtime": "ctranslate2", "path": "/a", "prompt_format": "generic"}
        assert draft.models["a"] == {**ours, "compute_type": "int8_float16"}
        assert draft.models["b"] == {**ours, "devices": ["gpu1"]}
        assert draft.models["c"] == {**ours, "devices": ["host"], "modalities": ["text"]}
        assert draft.virtual_models["a"]["defaults"] == {"beam_size": 4, "repetition_penalty": 1.2}
        assert notes(draft) == [
            "engine.models.c.gguf_n_ctx: not a field of this backend",
            "engine.decoding.min_p: requests have no such field",
        ]

    def test_llama_cpp_models(self):
        """The runtime of the same name, with the keys of the same name; numbers of ggml's types get their names."""
        fields = {
            "gguf_n_gpu_layers": "-1",
            "gguf_n_ctx": 4096,
            "gguf_flash_attn": "auto",
            "gguf_type_k": 8,
            "gguf_x": 1,
        }
        draft = llm_pool.convert(
            {"engine": {"models": {"a": {"backend": "llama_cpp", "model_path": "/a.gguf", **fields}}}}
        )
        draft.settle()
        keys = {"n_gpu_layers": -1, "n_ctx": 4096, "flash_attn": "auto", "type_k": "q8_0"}
        assert draft.models["a"] == {"runtime": "llama_cpp", "path": "/a.gguf", **keys}
        lost, look = notes(draft)
        assert lost == "engine.models.a.gguf_x: llama_cpp has no such key"
        assert "runtime llama_server needs no compiler" in look

    def test_exllamav3_models(self):
        common = {"backend": "exllamav3", "model_path": "/a"}
        sizes = {f"exllama_max_{name}": 512 for name in ("batch_size", "chunk_size", "q_size", "rq_tokens")}
        models = {
            "a": {**common, "exllama_cache_size": 8192, "exllama_cache_quant": None, **sizes},
            "b": {**common, "exllama_cache_quant": "Q8", "exllama_gpu_split": "16,8", "exllama_tensor_parallel": True},
            "c": {
                **common,
                "exllama_cache_quant": "8,4",
                "exllama_tensor_parallel": True,
                "exllama_tp_backend": "nccl",
            },
            "d": {**common, "exllama_cache_quant": "FP16"},
        }
        draft = llm_pool.convert({"engine": {"models": models}})
        draft.settle()
        ours = {"runtime": "exllamav3", "path": "/a"}
        kept = {name.removeprefix("exllama_"): value for name, value in sizes.items()}
        assert draft.models["a"] == {**ours, "cache_size": 8192, **kept}
        assert draft.models["b"] == {**ours, "cache_quant": 8, "gpu_split": [16, 8], "gpus": 2, "tensor_parallel": True}
        assert draft.models["c"] == {**ours, "cache_quant": [8, 4], "tp_backend": "nccl"}
        assert draft.models["d"] == ours
        assert [note.partition(":")[0] for note in notes(draft)] == ["engine.models.c.exllama_tensor_parallel"]

    @pytest.mark.parametrize("split", ["auto", "16;8", [None, 8], {"0": 16}])
    def test_a_division_that_is_not_in_gib_is_named(self, split):
        model = {"backend": "exllamav3", "model_path": "/a", "exllama_gpu_split": split}
        draft = llm_pool.convert({"engine": {"models": {"a": model}}})
        assert draft.models["a"] == {"runtime": "exllamav3", "path": "/a"}
        (note,) = notes(draft)
        assert note.startswith("engine.models.a.exllama_gpu_split: it isn't GiB of each GPU")

    def test_values_of_the_library_that_are_written_in_another_way(self):
        fields = {"gguf_type_k": "Q8_0", "gguf_n_gpu_layers": "--1", "gguf_n_ctx": "-1"}
        model = {"backend": "llama_cpp", "model_path": "/a.gguf", **fields}
        draft = llm_pool.convert({"engine": {"models": {"a": model}}})
        draft.settle()
        assert draft.models["a"] == {"runtime": "llama_cpp", "path": "/a.gguf", "type_k": "q8_0"}
        assert [note.partition(": ")[0] for note in notes(draft)][1:] == ["models.a.n_gpu_layers", "models.a.n_ctx"]

    def test_options_that_are_no_list_or_lack_a_value_are_named(self):
        """Nothing of them gets lost in silence."""
        server = {"backend": "llama_server", "model_path": "/a.gguf", "llama_server_extra_args": "--verbose"}
        serve = {"backend": "vllm_serve", "vllm_model": "/b"}
        models = {
            "a": server,
            "b": {**serve, "vllm_serve_extra_args": "--max-num-seqs 1"},
            "c": {**serve, "vllm_serve_extra_args": ["--max-num-seqs"]},
        }
        draft = llm_pool.convert({"engine": {"models": models}})
        assert [note for note in notes(draft) if "extra_args" in note] == [
            "engine.models.a.llama_server_extra_args: expected a list of words",
            "engine.models.b.vllm_serve_extra_args: expected a list of words",
            "engine.models.c.vllm_serve_extra_args.--max-num-seqs: its value is missing",
        ]

    def test_what_is_enabled_is_loaded_at_the_start(self):
        """Others can be loaded all the same, as there; a model that others run has no start."""
        gguf = {"backend": "llama_server", "model_path": "/a.gguf"}
        remote = {"backend": "openai_remote", "remote_base_url": "https://x.example/v1", "remote_model": "m"}
        models = {
            "no": {**gguf, "enabled": False},
            "yes": {**gguf, "enabled": True},
            "unsaid": gguf,
            "odd": {**gguf, "enabled": "no"},
            "far": {**remote, "enabled": True},
        }
        draft = llm_pool.convert({"engine": {"models": models}})
        draft.settle()
        assert draft.models["yes"] == {"path": "/a.gguf", "preload": True}
        assert draft.models["no"] == draft.models["unsaid"] == draft.models["odd"] == {"path": "/a.gguf"}
        assert "preload" not in draft.models["far"]
        assert draft.at_rest == {"no": "engine.models.no.enabled"}
        assert [note for note in notes(draft) if "enabled" in note] == [
            "engine.models.no.enabled: it isn't loaded at the start, as before; but here a request loads it, too",
            "engine.models.odd.enabled: expected true or false",
        ]

    def test_thinking_is_a_default(self):
        """Which a request may overrule."""
        gguf = {"backend": "llama_server", "model_path": "/a.gguf"}
        remote = {"backend": "openai_remote", "remote_base_url": "https://a.example/v1", "remote_model": "m"}
        models = {"a": {**gguf, "enable_thinking": False}, "b": {**remote, "remote_thinking": "enabled"}}
        draft = llm_pool.convert({"engine": {"decoding": {"top_p": 1}, "models": models}})
        draft.settle()
        assert draft.virtual_models == {
            "a": {"model": "a", "defaults": {"chat_template_kwargs": {"enable_thinking": False}, "top_p": 1}},
            "b": {"model": "b", "defaults": {"thinking": {"type": "enabled"}, "top_p": 1}},
        }
        assert draft.models["b"]["thinking_field"] == "thinking"

    def test_keys_that_llmux_has_no_more(self):
        fields = {"model_path": "/m.gguf", "llama_server_embeddings": True, "llama_server_alias": "x"}
        draft = llm_pool.convert({"engine": {"models": {"a": {"backend": "llama_server", **fields}}}})
        assert draft.models["a"]["type"] == "embedding"
        (note,) = [note for note in draft.notes if note.where.endswith("llama_server_alias")]
        assert note.message.startswith("another name for a model is a virtual model")

    def test_vllm_fields_and_options(self):
        """Both become keys; a field of its own wins over an option."""
        fields = {
            "vllm_model": "Qwen/Qwen3-8B",
            "vllm_max_model_len": 4096,
            "vllm_enable_prefix_caching": False,
            "vllm_max_pixels": 4014080,
            "vllm_kv_cache_memory_bytes": 1 << 30,
            "vllm_unheard_of": 1,
            "vllm_serve_host": "0.0.0.0",
            "vllm_serve_api_key": "secret",
            "vllm_serve_extra_args": [
                *(
                    "--max-num-seqs",
                    "1",
                    "--max_num_batched_tokens=2048",
                    "--max-model-len",
                    "99",
                    "--quantization",
                    "modelopt",
                ),
                *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--no-enforce-eager", "--port", "9"),
                *("--default-chat-template-kwargs", '{"enable_thinking": false}', "--attention-backend", "triton_attn"),
                *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2, "quantization": "fp8"}'),
                *("--num-gpu-blocks-override", "9", "-O3"),
            ],
        }
        draft = llm_pool.convert({"engine": {"models": {"a": {"backend": "vllm_serve", **fields}}}})
        assert draft.models["a"] == {
            "runtime": "vllm_serve",
            "model": "Qwen/Qwen3-8B",
            "max_model_len": 4096,
            "enable_prefix_caching": False,
            "max_pixels": 4014080,
            "kv_cache_memory_bytes": 1 << 30,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 2048,
            "quantization": "modelopt",
            "tool_call_parser": "hermes",
            "default_chat_template_kwargs": {"enable_thinking": False},
            "speculative_method": "mtp",
            "num_speculative_tokens": 2,
            "extra_args": ["--no-enforce-eager", "--attention-backend", "triton_attn", "-O3"],
        }
        assert notes(draft) == [
            "engine.models.a.vllm_unheard_of: vllm_serve has no such key; try extra_args",
            "engine.models.a.vllm_serve_host: llmux chooses it",
            "engine.models.a.vllm_serve_api_key: llmux chooses it",
            "engine.models.a.vllm_serve_extra_args.--port: llmux chooses it",
            "engine.models.a.vllm_serve_extra_args.--speculative-config.quantization: vllm_serve has no such key",
            "engine.models.a.vllm_serve_extra_args.--num-gpu-blocks-override: kv_cache_memory_bytes says how large the cache is",
        ]

    def test_vllm_in_a_process_of_its_pool(self):
        """Its fields are keys of the worker that runs the same engine; those of the server are none of its own."""
        fields = {
            "vllm_model": "Qwen/Qwen2.5-VL-3B-Instruct",
            "vllm_dtype": "bfloat16",
            "vllm_gpu_memory_utilization": 0.01,
            "vllm_kv_cache_memory_bytes": 1 << 30,
            "vllm_kv_cache_dtype": "fp8",
            "vllm_max_model_len": 12288,
            "vllm_tensor_parallel_size": 2,
            "vllm_trust_remote_code": True,
            "vllm_limit_mm_per_prompt": {"image": 1},
            "vllm_mm_processor_kwargs": {"max_pixels": 4014080},
            "vllm_speculative_method": "mtp",
            "vllm_speculative_model": "org/assistant",
            "vllm_speculative_moe_backend": "triton",
            "vllm_speculative_attention_backend": "triton_attn",
            "vllm_num_speculative_tokens": 8,
        }
        draft = llm_pool.convert({"engine": {"models": {"a": {"backend": "vllm", **fields, "vllm_serve_port": 1}}}})
        expected = {key.removeprefix("vllm_"): value for key, value in fields.items()}
        assert draft.models["a"] == {"runtime": "vllm", **expected}
        assert notes(draft) == [
            "engine.models.a.vllm_max_num_seqs: is 8, where it isn't set",
            "engine.models.a.vllm_serve_port: not a field of this backend",
        ]
        draft.settle()
        assert "a" in draft.models

    def test_a_share_of_a_device_sizes_no_cache(self):
        fields = {
            "vllm_model": "/m",
            "vllm_gpu_memory_utilization": 0.9,
            "vllm_max_model_len": 9,
            "vllm_max_num_seqs": 1,
        }
        draft = llm_pool.convert({"engine": {"models": {"a": {"backend": "vllm", **fields}}}})
        assert draft.models["a"] == {"runtime": "vllm", "path": "/m", "max_model_len": 9, "max_num_seqs": 1}
        (note,) = notes(draft)
        assert note.startswith("engine.models.a.vllm_gpu_memory_utilization: the KV cache is as large as one")

    def test_models_that_are_none(self):
        models = {"a": 3, "b": {}, "c": {"backend": "vllm"}, "d": {"backend": "llama_cpp", "model_path": "/d.gguf"}}
        draft = llm_pool.convert({"engine": {"models": models}})
        assert list(draft.models) == ["d"]
        assert notes(draft)[:3] == [
            "engine.models.a: expected an object",
            "engine.models.b: it has no backend",
            "engine.models.c: it has no vllm_model",
        ]

    def test_an_address_that_others_reach(self):
        models = {"a": {"backend": "llama_server", "model_path": "/a.gguf"}}
        draft = llm_pool.convert({"service": {"host": "0.0.0.0"}, "engine": {"models": models}})
        assert notes(draft) == ["service.host: others reach 0.0.0.0, so llmux wants keys: llmux keys add NAME"]

    def test_a_model_without_a_file_is_left_out(self):
        draft = llm_pool.convert({"engine": {"models": {"a": {"backend": "llama_server", "model_path": None}}}})
        draft.settle()
        assert draft.models == {}
        assert notes(draft) == ["models.a: is left out: nothing is left that could be run"]
