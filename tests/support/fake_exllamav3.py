"""A package `exllamav3` without CUDA: the part of its interface that our worker uses, in the order and form of the real one.

Tokens come from transformers, which runs the same checkpoint, greedily. A prompt that says `fail` ends its own job with an
error, one that says `exhaust` lets a whole step run out of memory, both as the real generator tells it.
tests/unit/runtimes/exllamav3 compares these signatures with those of the real library's sources.

`environment(folder)` makes an environment with it. In that environment, this file is the package.
"""

from __future__ import annotations

import json
from pathlib import Path

PAGE_SIZE = 256


def environment(folder: Path) -> Path:
    """A venv there, of what the worker needs beside ExLlamaV3; its Python."""
    from tests.support import environments

    (environments.borrowing(folder) / "exllamav3.py").write_text(Path(__file__).read_text())
    return folder / "bin" / "python"


class Config:
    def __init__(self, directory: str, config_dict: dict) -> None:
        self.directory = directory
        ends = config_dict.get("eos_token_id")
        self.eos_token_id_list = list(ends) if isinstance(ends, list) else [ends]

    @staticmethod
    def from_directory(directory: str, **kwargs) -> Config:
        config_dict = json.loads(Path(directory, "config.json").read_text())
        (name,) = config_dict["architectures"]
        assert name.startswith("Qwen3"), f"Unknown architecture {name} in {directory}/config.json"
        return Config(directory, config_dict)


class Model:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.network = None

    @staticmethod
    def from_config(config: Config, component: str = "text", **kwargs) -> Model:
        return Model(config)

    def load_gen(
        self,
        device=None,
        tp_output_device=None,
        reserve_per_device=None,
        use_per_device=None,
        tensor_p: bool = False,
        progressbar: bool = False,
        max_chunk_size: int = 2048,
        max_output_size: int = 32,
        max_output_factor: int = 1,
        callback=None,
        generator: bool = True,
        tp_dev_limits=None,
        tp_backend: str = "native",
        verbose: bool = False,
        max_batch_size: int = 1,
        tp_options=None,
        autosplit_no_forward: bool = False,
        draft_model=None,
    ):
        from transformers import AutoModelForCausalLM

        self.network = AutoModelForCausalLM.from_pretrained(self.config.directory)
        yield 1

    def load(self, *args, **kwargs) -> None:
        for _ in self.load_gen(*args, **kwargs):
            pass


class CacheLayer_quant:
    def __init__(self, config, attention, cache_id, max_num_tokens, k_bits, v_bits, compand_a=0.0) -> None:
        assert 2 <= k_bits <= 8
        assert 2 <= v_bits <= 8


class Cache:
    def __init__(
        self,
        model: Model,
        max_num_tokens: int,
        layer_type=None,
        max_batch_size: int = 16,
        max_history: int = 0,
        recurrent_dtype=None,
        **kwargs,
    ) -> None:
        assert max_num_tokens % PAGE_SIZE == 0
        if layer_type is not None:
            layer_type(model.config, None, id(self), max_num_tokens, **kwargs)
        self.max_num_tokens = max_num_tokens


class Tokenizer:
    def __init__(self, config: Config) -> None:
        import tokenizers

        folder = Path(config.directory)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer_config_dict = json.loads((folder / "tokenizer_config.json").read_text())
        self.generation_config_dict = json.loads((folder / "generation_config.json").read_text())
        ends = self.generation_config_dict.get("eos_token_id")
        config.eos_token_id_list += [end for end in ends if end not in config.eos_token_id_list]
        added = self.tokenizer.get_added_tokens_decoder()
        self.extended_id_to_piece = {number: token.content for number, token in added.items() if token.special}
        self.bos_token, self.eos_token = None, self.tokenizer_config_dict["eos_token"]
        self.actual_vocab_size = self.tokenizer.get_vocab_size()

    @staticmethod
    def from_config(config: Config) -> Tokenizer:
        return Tokenizer(config)

    def encode(
        self,
        text,
        add_bos: bool = False,
        add_eos: bool = False,
        encode_special_tokens: bool = False,
        return_offsets: bool = False,
        embeddings=None,
    ):
        import torch

        return torch.tensor([self.tokenizer.encode(text, add_special_tokens=False).ids], dtype=torch.long)

    def decode(self, ids, decode_special_tokens: bool = False):
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=not decode_special_tokens)


class ComboSampler:
    def __init__(
        self,
        rep_p: float = 1.0,
        freq_p: float = 0.0,
        pres_p: float = 0.0,
        rep_sustain_range: int = 100_000_000,
        rep_decay_range: int = 0,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_range: int = 0,
        dry_sequence_breakers=None,
        temperature: float = 1.0,
        min_p: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        temp_last: bool = False,
        adaptive_target: float = 1.0,
        adaptive_decay: float = 0.9,
        logit_bias=None,
    ) -> None:
        self.logit_bias = logit_bias or {}


class Job:
    def __init__(
        self,
        input_ids,
        max_new_tokens=None,
        min_new_tokens: int = 0,
        max_skips=4,
        sampler=None,
        seed=None,
        stop_conditions=None,
        decode_special_tokens: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        return_probs: bool = False,
        filters=None,
        token_healing: bool = False,
        identifier=None,
        banned_strings=None,
        embeddings=None,
        max_rq_tokens=None,
        stop_on_loop=None,
        rq_state=None,
        **kwargs,
    ) -> None:
        assert not kwargs
        assert input_ids.shape[0] == 1
        self.ids, self.sampler = input_ids, sampler
        self.max_new_tokens, self.stop_tokens, self.new_tokens = max_new_tokens, set(stop_conditions), 0
        self.held: list[int] = []


class Generator:
    def __init__(
        self,
        model: Model,
        cache: Cache,
        tokenizer: Tokenizer,
        max_batch_size: int = 256,
        max_chunk_size: int = 2048,
        shared_chunk_size=None,
        prefill_cooldown=4,
        max_q_size: int = 8,
        **kwargs,
    ) -> None:
        assert not kwargs
        self.model, self.cache, self.tokenizer, self.max_batch_size = model, cache, tokenizer, max_batch_size
        self.pending_jobs: list[Job] = []
        self.active_jobs: list[Job] = []

    def enqueue(self, job: Job) -> int:
        assert job.ids.shape[1] < self.cache.max_num_tokens, "Max. total tokens exceeds the cache"
        self.pending_jobs.append(job)
        return len(self.pending_jobs)

    def cancel(self, job: Job) -> None:
        for jobs in (self.pending_jobs, self.active_jobs):
            if job in jobs:
                jobs.remove(job)

    def clear_queue(self) -> None:
        self.pending_jobs.clear()
        self.active_jobs.clear()

    def iterate(self) -> list[dict]:
        results: list[dict] = []
        while self.pending_jobs and len(self.active_jobs) < self.max_batch_size:
            job = self.pending_jobs.pop(0)
            self.active_jobs.append(job)
            said = self.tokenizer.decode(job.ids[0])
            if "exhaust" in said:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
            if "fail" in said:
                self.active_jobs.remove(job)
                error = RuntimeError("non-finite logits")
                results.append({"job": job, "serial": 1, "stage": "error", "eos": True, "error": error})
            else:
                results.append({"job": job, "serial": 1, "stage": "prefill", "eos": False, "curr_progress": 1})
        for job in list(self.active_jobs):
            results.append(self._step(job))
        return results

    def _step(self, job: Job) -> dict:
        import torch

        with torch.inference_mode():
            scores = self.model.network(input_ids=job.ids).logits[0, -1]
            for number, value in job.sampler.logit_bias.items():
                scores[number] += value
            token = int(scores.argmax())
        job.ids = torch.cat([job.ids, torch.tensor([[token]])], dim=1)
        job.new_tokens += 1
        result: dict = {"job": job, "stage": "streaming", "eos": False, "serial": 1}
        if token in job.stop_tokens:
            result |= {"eos": True, "eos_reason": "stop_token", "eos_triggering_token_id": token}
        elif job.new_tokens >= job.max_new_tokens:
            result |= {"eos": True, "eos_reason": "max_new_tokens"}
        if token not in job.stop_tokens:
            job.held.append(token)
            if "\ufffd" not in self.tokenizer.decode(torch.tensor(job.held)) or result["eos"]:
                result["token_ids"] = torch.tensor([job.held], dtype=torch.long)
                job.held = []
        if result["eos"]:
            self.active_jobs.remove(job)
        return result
