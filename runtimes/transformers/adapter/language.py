"""Language models: facts from their folder, before anything is loaded.

Memory is the weights in the type they are loaded in, the caches of `parallel` requests of `n_ctx` tokens, the activations
of one step, and the program. The largest layer's cache counts three times: a step copies it, one token longer, and
attention repeats it for the heads that share it. tests/e2e/runtimes compares the sum with the memory of real workers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from pydantic import JsonValue

from runtimes.adapters import chat_workers, checkpoints
from runtimes.adapters.kv_cache import activation_bytes, cache_bytes, layer_caches
from runtimes.base import Capabilities, Contradiction, LaunchContext, ModelUnusableError, Thinking, in_order
from runtimes.estimate import MIB, Estimate
from runtimes.model_config import Modality
from runtimes.shared.kernel import Kernel
from runtimes.sizing import ENOUGH, Room, Size, Sizing, choose, contexts
from runtimes.transformers.adapter.config import TransformersConfig
from runtimes.transformers.adapter.kind import Kind
from runtimes.transformers.shared.quantised import KERNELS

THOUGHTS: Final = frozenset({"reasoning_content", "reasoning", "thinking"})
BUILT_IN: Final = {"gemma4": frozenset({"reasoning_content", "tool_calls", "content"})}
"""Type of model with only a response template in transformers itself → the fields of that template."""
MAX_CONTEXT: Final = 8192  # unless configured, or chosen for a device
PROGRAM_MIB: Final = (
    420  # interpreter, torch and transformers without a model: 350 to 440, see docs/runtimes.md#figures
)
GENERATING: Final = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")
PLAIN_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
SHRUNK_BITS: Final = {"fp8": 8, "mxfp4": 4.25, "bitsandbytes-8bit": 8, "bitsandbytes-4bit": 4.5}
STORED_BITS: Final = {"mxfp4": 4.25, "fp8": 8}  # methods that `quantization: none` can dequantise
VISION_TOKENS: Final = 4096  # patches of a large picture


class Language(Kind):
    """The adapter of language models: chat and completions."""

    program = "runtimes.transformers.worker.chat"
    summary = "Language models."
    all_endpoints = chat_workers.ENDPOINTS
    keys = frozenset(
        {"n_ctx", "quantization", "device_map", "gpus", "attention", "prefill_tokens"}
        | {"chat_template_file", "tool_format", "image_pixels"}
    )
    overridable_keys = ("dtype", "parallel", "threads", "n_ctx", "quantization", "prefill_tokens", "image_pixels")

    def problems(self, config: TransformersConfig) -> Iterator[str]:
        """Problems: no model in the folder, or a model that doesn't generate text."""
        return _problems(config)

    def options(self, config: TransformersConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """The worker's own settings. Raises ModelUnusableError if the device can't run the model."""
        folder = checkpoints.read(config.path)
        on_gpu = context.device.kind.accelerates and config.device_map != "cpu"
        if not on_gpu:
            _refuse_gpu_kernels(config, folder)
        template = config.chat_template_file
        tables_kept: dict[str, JsonValue] = {"": 0}
        limits = _weight_limits(config, folder, context.parts_mib) if config.gpus == "auto" else None
        several = "balanced" if limits is None else "sequential"
        placed = {"auto": tables_kept if len(context.devices) == 1 else several, "cpu": "cpu"}
        return {
            "name": context.model,
            "path": str(config.path),
            "device": context.device.kind.accelerator if on_gpu else "cpu",
            "dtype": config.dtype,
            "quantization": config.quantization,
            "device_map": placed[config.device_map] if isinstance(config.device_map, str) else dict(config.device_map),
            "max_memory": limits,
            "attention": config.attention,
            "n_ctx": _context(config, folder),
            "prefill_tokens": config.prefill_tokens,
            "tool_format": config.tool_format,
            "chat_template": None if template is None else template.read_text(encoding="utf-8"),
            "image_pixels": config.image_pixels,
        }

    def kernels(
        self, config: TransformersConfig, described: Callable[[], Mapping[str, JsonValue]]
    ) -> tuple[Kernel, ...]:
        """The kernels for the configured quantisation method, or else for that of the files."""
        if config.device_map == "cpu":
            return ()
        stated = config.quantization
        method = stated if stated != "auto" else checkpoints.config_of(described()).quantization
        return KERNELS.get(method or "", ())

    def estimate(self, config: TransformersConfig) -> Estimate | None:
        """Weights, caches, activations, program; None if the files don't suffice."""
        try:
            folder = checkpoints.read(config.path)
        except ModelUnusableError:
            return None
        width = _value_bytes(config, folder)
        context, step = _context(config, folder), max(config.prefill_tokens, config.parallel)
        layers = layer_caches(folder.config, value_bytes=width, latent=False)
        weights = _weight_bytes(config, folder)
        cache = cache_bytes(layers, context, config.parallel)
        cache += 2 * max((cache_bytes((layer,), context, config.parallel) for layer in layers), default=0)
        activations = activation_bytes(folder.config, tokens=step, value_bytes=width, outputs=config.parallel)
        if _takes_images(folder):
            activations += _vision_bytes(folder, config, width)
        parts = {
            "weights": weights,
            "KV cache": cache,
            "activations": activations * config.equal_gpus,  # each GPU has its own of these
            "program": PROGRAM_MIB * MIB * config.equal_gpus,
        }
        note = f"{folder.config.model_type}, {config.parallel} requests of {context} tokens"
        found = Estimate.of(parts, note, each=activations + PROGRAM_MIB * MIB)
        return found if folder.weights.lists_tensors else dataclasses.replace(found, source="file_size")

    def sized(self, config: TransformersConfig, room: Room | None) -> tuple[TransformersConfig, Sizing | None]:
        """Chooses the context and, unless configured, `parallel`: each request has its own context."""
        try:
            folder = checkpoints.read(config.path)
        except ModelUnusableError:
            return config, None
        trained = folder.config.context or 0
        if config.n_ctx is not None or room is None:
            why = "" if config.n_ctx is None else "as configured"
            return config, Sizing(_context(config, folder), config.parallel, trained, why)
        counts = (config.parallel,) if "parallel" in config.model_fields_set else (config.parallel, 2, 1)

        def with_size(size: Size) -> TransformersConfig:
            return config.model_copy(update={"n_ctx": size.context, "parallel": size.slots})

        def footprint_mib(size: Size) -> int:
            estimate = self.estimate(with_size(size))
            assert estimate is not None, "the folder was just read"
            return estimate.mib

        steps = contexts(trained or MAX_CONTEXT)
        sizes = [Size(step, counts[0], is_luxury=True) for step in steps if step > ENOUGH]
        sizes += [Size(step, count, count > counts[-1]) for step in steps if step <= ENOUGH for count in counts]
        size, why = choose(sizes, room, footprint_mib)
        return with_size(size), Sizing(size.context, size.slots, trained, why)

    def inputs(self, config: TransformersConfig) -> frozenset[Modality]:
        """Text; images too if the model has a vision encoder and the folder its preprocessor."""
        try:
            images = _takes_images(checkpoints.read(config.path))
        except ModelUnusableError:
            images = False
        return frozenset({"text", "image"}) if images else frozenset({"text"})

    def capabilities(self, config: TransformersConfig) -> Capabilities:
        """The abilities that configuration and chat template show."""
        modalities = in_order(self.inputs(config))
        try:
            folder = checkpoints.read(config.path)
        except ModelUnusableError:
            return Capabilities(modalities)
        template = _read_template(config, folder)
        described = _response_fields(config, folder)
        return Capabilities(
            modalities=modalities,
            tools="tools" in template and (_writes_calls(config, template) or "tool_calls" in described),
            thinking=chat_workers.thinks(template) or bool(described & THOUGHTS),
            multi_turn=bool(template),
            context=_context(config, folder),
        )

    def chat_template(self, config: TransformersConfig) -> str | None:
        """The configured chat template, else the one in the model's folder."""
        try:
            return _read_template(config, checkpoints.read(config.path))
        except ModelUnusableError:
            return None

    def thinking(self, config: TransformersConfig) -> Thinking | None:
        """By an argument of the chat template, if the template has it. gpt-oss only has levels of effort."""
        return chat_workers.thinking(self.chat_template(config))


def _problems(config: TransformersConfig) -> Iterator[str]:
    try:
        folder = checkpoints.read(config.path)
    except ModelUnusableError as error:
        yield f"path: {error}"
        return
    names = folder.config.architectures
    if not names:
        yield f"path: {config.path / 'config.json'} names no architectures"
    elif not GENERATING.search(names[0]) or (
        names[0].endswith("ConditionalGeneration") and not _is_vision_language_model(folder)
    ):
        hint = "; set type: asr" if folder.config.takes_audio else ""
        yield f"path: {names[0]} is no language model that generates text{hint}"
    if not (config.path / "tokenizer.json").is_file() and not (config.path / "tokenizer_config.json").is_file():
        yield f"path: {config.path} has no tokenizer"
    if config.chat_template_file is not None and not config.chat_template_file.is_file():
        yield f"chat_template_file: {config.chat_template_file}: there is no such file"
    trained = folder.config.context
    if config.n_ctx is not None and trained is not None and config.n_ctx > trained:
        yield f"n_ctx: the model was made for {trained} tokens at most"
    yield from _device_problems(config)
    stored = folder.config.quantization
    if config.quantization == "none" and stored is not None and stored not in STORED_BITS:
        yield f"quantization: weights quantised by {stored} can't be made plain again"
    if config.quantization not in ("auto", "none", stored) and stored is not None:
        yield f"quantization: the files are quantised by {stored} already"


def _device_problems(config: TransformersConfig) -> Iterator[str]:
    if config.device_map != "auto" and config.gpus == "auto":
        yield Contradiction("gpus: auto, but device_map says where the model goes; remove one of the two")
    elif config.device_map == "cpu" and config.equal_gpus > 1:
        yield Contradiction(
            f"gpus: {config.gpus} GPUs, but device_map puts the model on the processor; remove one of the two"
        )
    elif isinstance(config.device_map, dict):
        for module, place in config.device_map.items():
            if place != "cpu" and place >= config.equal_gpus:
                yield Contradiction(
                    f"device_map: {module or 'all'} is put on GPU {place}, and the worker has {config.gpus}, from 0 on; set gpus"
                )


def _weight_limits(
    config: TransformersConfig, folder: checkpoints.Folder, parts_mib: tuple[int, ...]
) -> list[JsonValue] | None:
    """The limit in bytes of weights for each GPU, in proportion to its part. GPUs are filled in order. None: only one GPU.

    Layers aren't divided, so each limit has room for half a layer more; the last GPU takes the rest. On the first GPU accelerate
    keeps room for the largest layer, or for the output layer if that is not the embedding table.
    """
    if len(parts_mib) < 2:
        return None
    weights = _weight_bytes(config, folder)
    layer = weights // max(1, folder.config.layers)
    limits = [weights * mib // sum(parts_mib) + layer // 2 for mib in parts_mib[:-1]]
    limits[0] += layer if _is_tied(folder) else max(layer, _table_bytes(config, folder))
    return [*limits, parts_mib[-1] * MIB]


def _is_tied(folder: checkpoints.Folder) -> bool:
    """Does the output layer share the embedding table?"""
    values = folder.config.values
    return bool(folder.config.text.get("tie_word_embeddings", values.get("tie_word_embeddings")))


def _table_bytes(config: TransformersConfig, folder: checkpoints.Folder) -> int:
    return folder.config.vocabulary * folder.config.width * _value_bytes(config, folder)


def _is_vision_language_model(folder: checkpoints.Folder) -> bool:
    """Is this ForConditionalGeneration class a language model with a vision encoder, not an encoder-decoder?"""
    return folder.config.text is not folder.config.values and not folder.config.values.get("is_encoder_decoder")


def _takes_images(folder: checkpoints.Folder) -> bool:
    """Does the worker support the model's vision? It supports models like Qwen-VL, with one token for each merged patch."""
    found = checkpoints.json_object(folder.path / "preprocessor_config.json")
    return folder.config.takes_images and "image_token_id" in folder.config.values and "merge_size" in found


def _context(config: TransformersConfig, folder: checkpoints.Folder) -> int:
    return config.n_ctx or min(folder.config.context or MAX_CONTEXT, MAX_CONTEXT)


def _read_template(config: TransformersConfig, folder: checkpoints.Folder) -> str:
    if config.chat_template_file is not None and config.chat_template_file.is_file():
        return config.chat_template_file.read_text(encoding="utf-8", errors="replace")
    return checkpoints.chat_template(folder.path) or ""


def _response_fields(config: TransformersConfig, folder: checkpoints.Folder) -> frozenset[str]:
    """The fields that a response template finds in answers: the folder's template, or else transformers' own for this type."""
    if config.tool_format != "auto":
        return frozenset()
    found = checkpoints.json_object(folder.path / "tokenizer_config.json").get("response_template")
    fields = found.get("fields") if isinstance(found, dict) else None
    if isinstance(fields, dict):
        return frozenset(fields)
    return BUILT_IN.get(str(folder.config.values.get("model_type")), frozenset())


def _writes_calls(config: TransformersConfig, template: str) -> bool:
    """Can the worker parse the model's tool calls? As configured, else by markers in the chat template."""
    if config.tool_format != "auto":
        return config.tool_format != "none"
    return chat_workers.writes_calls(template)


def _value_bytes(config: TransformersConfig, folder: checkpoints.Folder) -> int:
    """Bytes of a value in caches and activations."""
    dtype = folder.config.dtype if config.dtype == "auto" else config.dtype
    return PLAIN_BYTES.get(dtype or "", 4)


def _weight_bytes(config: TransformersConfig, folder: checkpoints.Folder) -> int:
    dtype = folder.config.dtype if config.dtype == "auto" else config.dtype
    size = folder.weights.bytes_as(dtype)
    stored = STORED_BITS.get(folder.config.quantization or "")
    if config.quantization == "none" and stored is not None:
        return int(size * 16 / stored)
    if config.quantization in SHRUNK_BITS and folder.config.quantization is None:
        tables = (1 if _is_tied(folder) else 2) * _table_bytes(config, folder)
        tables_kept = min(size, tables)  # embeddings and output aren't quantised
        return tables_kept + int(
            (size - tables_kept) * SHRUNK_BITS[config.quantization] / (8 * _value_bytes(config, folder))
        )
    return size


def _vision_bytes(folder: checkpoints.Folder, config: TransformersConfig, width: int) -> int:
    """Bytes for the patches of one large image in the widest layer of the encoder."""
    found = folder.config.values.get("vision_config")
    sizes = found if isinstance(found, dict) else {}
    hidden, inner = (
        value if isinstance(value := sizes.get(name), int) else 1024 for name in ("hidden_size", "intermediate_size")
    )
    pixels = config.image_pixels or VISION_TOKENS * 256
    return pixels // 256 * width * (6 * hidden + inner)


def _refuse_gpu_kernels(config: TransformersConfig, folder: checkpoints.Folder) -> None:
    """Raises ModelUnusableError if the model needs GPU kernels, for a device without them."""
    if config.quantization not in ("auto", "none"):
        raise ModelUnusableError(f"quantization: {config.quantization} needs a GPU, and this worker has none")
    stored = folder.config.quantization
    if stored is not None and config.quantization == "auto":
        remedy = " Set quantization: none to compute plain weights from them." if stored in STORED_BITS else ""
        raise ModelUnusableError(f"path: weights quantised by {stored} need a GPU, and this worker has none.{remedy}")
    if config.attention == "flash_attention_2":
        raise ModelUnusableError("attention: flash_attention_2 needs a GPU, and this worker has none")
