"""Loads a GGUF file with llama-cpp-python. `Loaded` implements `runtimes.sdk.chat.language.Language` with its vocabulary."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import llama_cpp
from llama_cpp import Llama, _internals, llama, llama_chat_format

from runtimes.llama_cpp.shared.formats import CACHE_TYPES, CHAT_FORMATS
from runtimes.sdk.chat.language import Format, format_of, markers_of

PIECE_BYTES: Final = 4096
TEMPLATE: Final = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class Options:
    """The worker's options (adapter.py)."""

    path: str
    n_gpu_layers: int
    n_ctx: int
    n_batch: int
    flash_attn: Literal["auto", "on", "off"]
    type_k: str
    type_v: str
    chat_format: str | None
    threads: int | None
    tensor_split: list[float] | None


class Engine(Llama):  # type: ignore[misc]  # the library has no types here
    """The library's model. It calls `check` between two batches of a prompt; `check` raises if nobody waits any more."""

    check: Callable[[], None] = staticmethod(lambda: None)

    def eval(self, tokens: Sequence[int]) -> None:
        """Compute the cache and scores of these tokens, batch by batch."""
        for begin in range(0, len(tokens), self.n_batch):
            self.check()
            super().eval(tokens[begin : begin + self.n_batch])


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model, as a `Language`. `formatter`: a configured chat format, which replaces the file's template."""

    engine: Engine
    template: str
    formatter: Callable[..., Any] | None
    special: Mapping[str, str]
    format: Format
    ends: frozenset[int]
    hidden: frozenset[int]
    knows_tools: bool
    takes_images: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        size: int = self.engine.n_vocab()
        return size

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens, special tokens included."""
        return b"".join(piece(self.engine, token) for token in tokens).decode("utf-8", errors="replace")

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered prompt. Adds the model's first token, unless the template wrote it."""
        begins = bool(self.special["bos_token"]) and text.startswith(self.special["bos_token"])
        tokens: list[int] = self.engine.tokenize(text.encode(), add_bos=not begins, special=True)
        return tokens

    def encode_prompt(self, text: str) -> list[int]:
        """A text's tokens, with the special tokens that the model adds."""
        tokens: list[int] = self.engine.tokenize(text.encode(), add_bos=True, special=True)
        return tokens


def load(options: Options) -> Loaded:
    """Load the model. Blocks. Raises whatever the library raises."""
    for module in (llama, _internals):  # otherwise all output is lost during the load, error messages included
        module.suppress_stdout_stderr = lambda **_disable: contextlib.nullcontext()
    if options.flash_attn == "auto":  # the library's switch has two positions, llama.cpp's three
        llama_cpp.llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
    engine = Engine(
        options.path,
        n_gpu_layers=options.n_gpu_layers,
        n_ctx=options.n_ctx,
        n_batch=options.n_batch,
        n_ubatch=options.n_batch,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        flash_attn=options.flash_attn != "off",
        type_k=CACHE_TYPES[options.type_k],
        type_v=CACHE_TYPES[options.type_v],
        tensor_split=options.tensor_split,
        verbose=False,
    )
    vocabulary = llama_cpp.llama_model_get_vocab(engine.model)
    numbers = range(engine.n_vocab())
    template = "" if options.chat_format else str(engine.metadata.get(TEMPLATE, ""))
    form = format_of(template)
    control = frozenset(token for token in numbers if llama_cpp.llama_vocab_is_control(vocabulary, token))
    markers = {name.encode() for name in markers_of(form)}
    return Loaded(
        engine=engine,
        template=template,
        formatter=getattr(llama_chat_format, CHAT_FORMATS[options.chat_format]) if options.chat_format else None,
        special={
            "bos_token": _token_text(engine, engine.token_bos()),
            "eos_token": _token_text(engine, engine.token_eos()),
        },
        format=form,
        ends=frozenset(token for token in numbers if llama_cpp.llama_vocab_is_eog(vocabulary, token)),
        hidden=frozenset(token for token in control if piece(engine, token) not in markers),
        knows_tools=form != "none" and "tools" in template,
    )


def piece(engine: Llama, token: int) -> bytes:
    """A token's text. The library's own function reads no more than 32 bytes of it."""
    buffer = ctypes.create_string_buffer(PIECE_BYTES)
    vocabulary = llama_cpp.llama_model_get_vocab(engine.model)
    size = llama_cpp.llama_token_to_piece(vocabulary, token, buffer, PIECE_BYTES, 0, True)
    return buffer.raw[: max(0, size)]


def _token_text(engine: Llama, token: int) -> str:
    return piece(engine, token).decode("utf-8", errors="replace") if token >= 0 else ""
