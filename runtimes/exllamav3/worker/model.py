"""Loads a model folder with ExLlamaV3, and makes its tokenizer a `Language`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from exllamav3 import Cache, CacheLayer_quant, Config, Generator, Model, Tokenizer

from runtimes.sdk.chat.language import Format, defaults_of, format_of, markers_of


@dataclass(frozen=True, slots=True)
class Options:
    """The worker's options (adapter.py). `use_per_device`: GiB of each GPU; None: the library divides the model."""

    path: str
    context: int
    cache_size: int
    cache_quant: list[int] | None
    use_per_device: list[float] | None
    tensor_parallel: bool
    tp_backend: Literal["native", "nccl"]
    max_batch_size: int
    max_chunk_size: int
    max_q_size: int
    max_rq_tokens: int | None
    adds_bos: bool
    chat_template: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model: a `Language`."""

    generator: Generator
    tokenizer: Tokenizer
    template: str
    special: Mapping[str, str]
    format: Format
    ends: frozenset[int]
    hidden: frozenset[int]
    defaults: Mapping[str, float]
    adds_bos: bool
    knows_tools: bool = False  # a tool's result would be a second turn
    takes_images: bool = False

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        size: int = self.tokenizer.actual_vocab_size
        return size

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens, special tokens included."""
        text: str = self.tokenizer.decode(torch.tensor(list(tokens), dtype=torch.long), decode_special_tokens=True)
        return text

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered prompt. Special tokens that the text spells out are recognised."""
        tokens: list[int] = self.tokenizer.encode(text, encode_special_tokens=True)[0].tolist()
        return tokens

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a text, after the first token that the model expects."""
        tokens: list[int] = self.tokenizer.encode(text, add_bos=self.adds_bos, encode_special_tokens=True)[0].tolist()
        return tokens


def load(options: Options) -> Loaded:
    """Load the model. Blocks. Raises whatever the library raises."""
    config = Config.from_directory(options.path)
    model = Model.from_config(config)
    if options.cache_quant is None:
        cache = Cache(model, max_num_tokens=options.cache_size, max_batch_size=options.max_batch_size)
    else:
        keys, values = options.cache_quant
        cache = Cache(
            model,
            max_num_tokens=options.cache_size,
            max_batch_size=options.max_batch_size,
            layer_type=CacheLayer_quant,
            k_bits=keys,
            v_bits=values,
        )
    model.load(
        use_per_device=options.use_per_device,
        tensor_p=options.tensor_parallel,
        tp_backend=options.tp_backend,
        max_chunk_size=options.max_chunk_size,
        max_batch_size=options.max_batch_size,
        progressbar=False,
    )
    tokenizer = Tokenizer.from_config(config)
    generator = Generator(
        model,
        cache,
        tokenizer,
        max_batch_size=options.max_batch_size,
        max_chunk_size=options.max_chunk_size,
        max_q_size=options.max_q_size,
    )
    form = format_of(options.chat_template)
    markers = markers_of(form)
    return Loaded(
        generator=generator,
        tokenizer=tokenizer,
        template=options.chat_template,
        special={"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or ""},
        format=form,
        ends=frozenset(config.eos_token_id_list),
        hidden=frozenset(token for token, text in tokenizer.extended_id_to_piece.items() if text not in markers),
        defaults=defaults_of(tokenizer.generation_config_dict or {}),
        adds_bos=options.adds_bos,
    )


def prompt_ids(tokens: Sequence[int]) -> Any:
    """The tokens in the form that a job of the library takes."""
    return torch.tensor([list(tokens)], dtype=torch.long)
