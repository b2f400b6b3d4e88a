"""Options of llama-server: what they become."""

from __future__ import annotations

from supervisor.cli.importers.llama_options import Options
from tests.support.cases import cases


class TestLlamaServerOptions:
    """Its command line as keys, request defaults, and what is left."""

    @cases(
        ("line", "keys"),
        [
            ("-m a.gguf -c 4096 -ngl 99", {"path": "a.gguf", "n_ctx": 4096, "n_gpu_layers": 99}),
            ("-m a.gguf --gpu-layers all -fa", {"path": "a.gguf", "n_gpu_layers": "all", "flash_attn": "on"}),
            ("-fa 0 --jinja", {"flash_attn": "off"}),
            ("-fa --no-jinja --no-mmproj-offload", {"flash_attn": "on", "jinja": False, "mmproj_offload": False}),
            ("--mlock", {"load_mode": "mmap+mlock"}),
            ("--mlock --no-mmap", {"load_mode": "mlock"}),
            ("--no-mmap", {"load_mode": "none"}),
            ("--embedding --pooling cls", {"type": "embedding", "pooling": "cls"}),
            ("--reranking", {"type": "embedding", "rerank": True}),
            ("--lora a,b --lora c", {"lora": ["a", "b", "c"]}),
            ("--ctx_size 1024", {"n_ctx": 1024}),
            ("--rope-freq-scale 0.5 --alias 7", {"rope_freq_scale": "0.5"}),
            ("--sleep-idle-seconds 60", {"keep_alive_s": 60}),
            ("--host 0.0.0.0 --port 1 --metrics --no-webui", {}),
            ("-np -1 -ngl auto", {}),
            ("--n-cpu-moe 3 --no-warmup", {"extra_args": ["--n-cpu-moe", "3", "--no-warmup"]}),
            ("--draft-max 16 --draft-min 4", {"spec_draft_n_max": 16, "extra_args": ["--spec-draft-n-min", "4"]}),
            ("--spec-type draft", {"spec_type": "draft-simple"}),
            ("--spec-type draft-mtp,ngram-mod", {"spec_type": ["draft-mtp", "ngram-mod"]}),
            ("--ctx-size-draft 9 --slots", {"extra_args": ["--slots"]}),
            ("--override-kv -1", {"extra_args": ["--override-kv", "-1"]}),
        ],
    )
    def test_keys(self, line, keys):
        assert Options.read(line.split()).keys == keys

    def test_request_defaults(self):
        line = '--temp 0 --top-k 20 -n -1 --seed -1 --chat-template-kwargs {"a":1}'
        assert Options.read(line.split()).defaults == {
            "temperature": 0,
            "top_k": 20,
            "chat_template_kwargs": {"a": 1},
        }

    def test_what_is_llmuxs_own(self):
        options = Options.read(["--api-key", "x", "--split-mode", "row", "--fit", "on", "-hf", "a/b"])
        assert options.keys == {}
        assert [option for option, _ in options.lost] == ["--api-key", "--split-mode", "--fit"]
        assert options.is_remote
