"""A package `vllm` without vLLM: the part of its interface that our worker uses, in the order and form of the real one.

Text comes from transformers, which runs the same checkpoint token by token, greedily; grammars are llguidance's, as in vLLM.
It does on one machine thread what vLLM does in processes, except for the engine core, whose death a test can cause: a child
process that does nothing. tests/e2e/runtimes/test_vllm.py compares these signatures with a real vLLM's.

`environment(folder)` makes an environment with it. In that environment, this file is the package.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import subprocess
import sys
import types
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

SUBMODULES = (
    *("config", "exceptions", "outputs", "sampling_params", "engine", "engine.arg_utils"),
    *("utils", "utils.argparse_utils"),
    *("v1", "v1.engine", "v1.engine.async_llm", "v1.engine.exceptions"),
)


def environment(folder: Path) -> Path:
    """A venv there, of what the worker needs beside vLLM; its Python."""
    from tests.support import environments

    (environments.borrowing(folder) / "vllm.py").write_text(Path(__file__).read_text())
    return folder / "bin" / "python"


BLOCK = 16  # tokens that are kept together


class VLLMClientError(Exception):
    """The request is wrong."""


class EngineDeadError(Exception):
    """The engine core has ended."""


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes the words of a command line."""


@dataclass
class StructuredOutputsConfig:
    backend: str = "auto"


@dataclass
class StructuredOutputsParams:
    grammar: str | None = None


@dataclass
class SamplingParams:
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None

    def __post_init__(self):
        if not 0 < self.top_p <= 1:
            raise VLLMClientError(f"top_p must be in (0, 1], got {self.top_p}.")


@dataclass
class AsyncEngineArgs:
    model: str
    served_model_name: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    load_format: str = "auto"
    trust_remote_code: bool = False
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    cpu_offload_gb: float = 0
    enforce_eager: bool = False
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    tensor_parallel_size: int = 1
    limit_mm_per_prompt: dict = field(default_factory=dict)
    mm_processor_kwargs: dict | None = None
    speculative_config: dict | None = None
    structured_outputs_config: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)

    @staticmethod
    def add_cli_args(parser, async_args_only=False):
        parser.add_argument("--enforce-eager", action="store_true")
        parser.add_argument("--enable-chunked-prefill", action=argparse.BooleanOptionalAction)
        parser.add_argument("--tokenizer")
        return parser

    @classmethod
    def from_cli_args(cls, args):
        return cls(**vars(args))


@dataclass
class Logprob:
    logprob: float


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None


class ModelConfig:
    multimodal_config = None

    def __init__(self, arguments, config, generation):
        self.max_model_len = arguments.max_model_len
        self._config, self._generation = config, generation

    def get_vocab_size(self):
        return self._config.get_text_config().vocab_size

    def try_get_generation_config(self):
        return self._generation.to_diff_dict()


class Renderer:
    async def render_cmpl_async(self, prompts, tok_params=None, *, prompt_extras=None, skip_mm_cache=False):
        return [{"type": "token", **prompt} for prompt in prompts]


class AsyncLLM:
    def __init__(self, arguments):
        import torch
        import transformers

        if arguments.quantization is not None:
            raise ValueError(f"Unknown quantization method: {arguments.quantization}")
        torch.set_num_threads(1)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
        self.model_config = ModelConfig(arguments, self._model.config, self._model.generation_config)
        self.renderer = Renderer()
        self.output_handler = None
        self.running = set()
        self._kept = {}  # salt → prompts
        self._core = subprocess.Popen([sys.executable, "-IS", "-c", "import signal; signal.pause()"])

    @classmethod
    def from_engine_args(cls, engine_args, start_engine_loop=True, usage_context=None, stat_loggers=None):
        return cls(engine_args)

    def get_tokenizer(self):
        return self._tokenizer

    def shutdown(self, timeout=None):
        self._core.kill()
        self._core.wait()

    async def _watch(self):
        while self._core.poll() is None:
            await asyncio.sleep(0.05)

    async def generate(
        self,
        prompt,
        sampling_params,
        request_id,
        *,
        prompt_text=None,
        lora_request=None,
        tokenization_kwargs=None,
        trace_headers=None,
        priority=0,
        data_parallel_rank=None,
        session_id=None,
        kv_hints=None,
        reasoning_ended=None,
        reasoning_parser_kwargs=None,
    ):
        import torch

        if self._core.poll() is not None:
            raise EngineDeadError
        if self.output_handler is None:
            self.output_handler = asyncio.create_task(self._watch())
        matcher = self._matcher(sampling_params.structured_outputs)
        given, ends = list(prompt["prompt_token_ids"]), set(sampling_params.stop_token_ids or ())
        ends.add(self._tokenizer.eos_token_id)
        kept = self._kept.setdefault(prompt.get("cache_salt"), set())
        cached = (len(given) - 1) // BLOCK * BLOCK if tuple(given) in kept else 0
        kept.add(tuple(given))
        self.running.add(request_id)
        try:
            for count in range(1, sampling_params.max_tokens + 1):
                scores = await asyncio.to_thread(self._scores, given)
                chosen = scores.clone()
                for token, bias in (sampling_params.logit_bias or {}).items():
                    chosen[token] += bias
                if matcher is not None:
                    mask = matcher.compute_bitmask()
                    allowed = [bool(mask[token // 8] >> token % 8 & 1) for token in range(len(chosen))]
                    chosen[~torch.tensor(allowed)] = -torch.inf
                token = int(chosen.argmax())
                if matcher is not None:
                    matcher.consume_token(token)
                given.append(token)
                finish = "stop" if token in ends else "length" if count == sampling_params.max_tokens else None
                output = CompletionOutput(0, "", [token], None, self._logprobs(scores, token, sampling_params), finish)
                yield RequestOutput(request_id, given, [output], finish is not None, cached)
                if finish is not None:
                    return
        finally:
            self.running.discard(request_id)

    def _scores(self, tokens):
        import torch

        with torch.inference_mode():
            return self._model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)

    def _logprobs(self, scores, token, sampling_params):
        if sampling_params.logprobs is None:
            return None
        best = scores.topk(sampling_params.logprobs).indices.tolist()
        return [{number: Logprob(float(scores[number])) for number in (token, *best)}]

    def _matcher(self, wanted):
        if wanted is None:
            return None
        import llguidance
        import llguidance.hf

        tokens = llguidance.hf.from_tokenizer(self._tokenizer, self.model_config.get_vocab_size())
        matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(wanted.grammar))
        if matcher.is_error():
            raise VLLMClientError(matcher.get_error())
        return matcher


def _become_a_package():
    """Each submodule that is imported from has everything."""
    everything = {name: value for name, value in globals().items() if not name.startswith("_")}
    __spec__.submodule_search_locations = []
    sys.modules["vllm"].__path__ = []
    for name in SUBMODULES:
        module = types.ModuleType(f"vllm.{name}")
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, None, is_package=True)
        module.__path__ = []
        module.__dict__.update(everything)
        sys.modules[module.__name__] = module


if __name__ == "vllm":
    _become_a_package()
