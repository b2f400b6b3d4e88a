"""Chooses context, slots and batch where the configuration leaves them open, by model file and device (runtimes/sizing.py).

All slots share one context (`kv_unified`), so one slot may use all of it; there is a slot for each `SLOT` tokens, so that
a chat program's first request, with its tools, finds room beside others. With `kv_unified: false` each slot has enough.
Where a text must be read in one piece, as by most embedding models, the physical batch is as large as the context.
"""

from __future__ import annotations

from typing import Final

from runtimes.base import ModelUnusableError
from runtimes.llama_server.adapter import estimate, gguf_meta
from runtimes.llama_server.adapter.config import SLOTS, LlamaServerConfig, serves
from runtimes.sizing import ENOUGH, STEPS, Room, Size, Sizing, choose, contexts

SLOT: Final = 8192
PIECE: Final = 8192
"""The longest text that is read in one piece, unless configured: buffers grow with the square of it."""
_LAST: Final = 3  # llama_pooling_type


def sized(config: LlamaServerConfig, room: Room | None) -> tuple[LlamaServerConfig, Sizing | None]:
    """See Adapter.sized. No reasons if a file can't be read."""
    try:
        return _choose_size(config, room)
    except ModelUnusableError:
        return _with_size(config, Size(ENOUGH, SLOTS), in_one_piece=False), None


def _choose_size(config: LlamaServerConfig, room: Room | None) -> tuple[LlamaServerConfig, Sizing]:
    """See `sized`. Raises ModelUnusableError."""
    metadata = gguf_meta.read(config.path)
    in_one_piece = _reads_in_one_piece(config, metadata)
    trained = metadata.number("context_length")
    longest = trained or STEPS[-1]

    def footprint_mib(size: Size) -> int:
        return estimate.footprint(_with_size(config, size, in_one_piece=in_one_piece)).mib

    if config.n_ctx is not None:
        size, why = Size(config.n_ctx or longest, config.parallel or SLOTS), "as configured"
    else:
        steps = contexts(longest, PIECE if in_one_piece else STEPS[0])
        sizes = [Size(step, _slots(config, step, in_one_piece=in_one_piece), step > ENOUGH) for step in steps]
        size, why = choose(sizes, room, footprint_mib)
        if in_one_piece and size.context == PIECE < longest:
            why = "a text is read in one piece, which takes memory; set n_ctx for longer ones"
    return _with_size(config, size, in_one_piece=in_one_piece), Sizing(size.context, size.slots, trained, why)


def complete(config: LlamaServerConfig) -> LlamaServerConfig:
    """The configuration without open values: these are chosen as for an unknown device."""
    open_keys = {"n_ctx", "parallel", *(["ubatch_size"] if serves(config) != "text" else [])}
    return sized(config, None)[0] if any(getattr(config, key) is None for key in open_keys) else config


def _reads_in_one_piece(config: LlamaServerConfig, metadata: gguf_meta.Metadata) -> bool:
    """Must llama.cpp read a text in one piece? It reads part by part only for generation and for last-token embeddings."""
    if serves(config) != "embeddings":
        return serves(config) == "rerank"
    if config.pooling is not None:
        return config.pooling != "last"
    return metadata.number("pooling_type") != _LAST


def _slots(config: LlamaServerConfig, context: int, *, in_one_piece: bool) -> int:
    if config.parallel is not None:
        return config.parallel
    if in_one_piece and config.kv_unified:
        return SLOTS  # a text needs its context only while it is read
    return max(1, min(SLOTS, context // (SLOT if config.kv_unified else ENOUGH)))


def _with_size(config: LlamaServerConfig, size: Size, *, in_one_piece: bool) -> LlamaServerConfig:
    chosen = {"n_ctx": size.context, "parallel": size.slots}
    if in_one_piece:
        batch = config.ubatch_size or size.context
        chosen |= {"ubatch_size": batch, "batch_size": batch}
    return config.model_copy(update={key: value for key, value in chosen.items() if getattr(config, key) is None})
