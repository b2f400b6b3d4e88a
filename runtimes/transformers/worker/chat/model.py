"""Loads a model folder: model class, types, devices, tokenizer, output format.

Imports the model's class by name, so that none of the other four hundred families is loaded.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers.integrations.hub_kernels import get_kernel
from transformers.utils.chat_parsing.response_templates import ResponseTemplate
from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION, is_kernels_available

from runtimes.sdk.chat.language import defaults_of
from runtimes.sdk.chat.tokenizer import TokenizerLanguage, facts
from runtimes.transformers.shared.quantised import KERNELS
from runtimes.transformers.worker.chat.response_template import CALLS, response_template, used_tokens

PACKAGE = f"kernels>={KERNELS_MIN_VERSION},<{KERNELS_MAX_VERSION}"  # transformers takes no other for there
INSTALL = "llmux runtimes install transformers --accelerator cuda"


@dataclass(frozen=True, slots=True)
class Options:
    """The worker's options (adapter/language.py). `name` is the model's name in the configuration."""

    name: str
    path: str
    device: Literal["cpu", "cuda"]
    dtype: str
    quantization: str
    device_map: Any  # a word or a mapping of modules
    max_memory: list[int] | None  # bytes of weights for each GPU; None: as device_map has it
    attention: str
    n_ctx: int
    prefill_tokens: int
    tool_format: str
    chat_template: str | None
    image_pixels: int | None


@dataclass(frozen=True, slots=True)
class Loaded(TokenizerLanguage):
    """A loaded model. `image_processor`: None without vision. `answers`: the response template, if `format` is `template`."""

    model: Any
    image_processor: Any | None
    answers: ResponseTemplate | None

    @property
    def takes_images(self) -> bool:
        """Does the model have a vision encoder?"""
        return self.image_processor is not None

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        size: int = self.model.config.get_text_config().vocab_size
        return size

    @property
    def defaults(self) -> Mapping[str, float]:
        """The sampling defaults in generation_config.json."""
        return defaults_of(vars(self.model.generation_config))


def load(options: Options) -> Loaded:
    """Load the model. Blocks. Raises whatever transformers raises, and SystemExit for an unsupported model."""
    transformers.utils.logging.disable_progress_bar()  # the output is a log
    config = transformers.AutoConfig.from_pretrained(options.path)
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None or not kind.can_generate():
        raise SystemExit(
            f"{', '.join(names) or config.model_type}: transformers {transformers.__version__} has no such language model"
        )
    model = kind.from_pretrained(options.path, config=config, **_load_arguments(options, config))
    model.eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.path)
    if options.chat_template is not None:
        tokenizer.chat_template = options.chat_template
    ids = model.generation_config.eos_token_id
    known = facts(tokenizer, ids if isinstance(ids, list) else [ids], tool_format=options.tool_format)
    answers = None
    if known["format"] == "none" and options.tool_format == "auto":
        answers = response_template(tokenizer, model)
    if answers is not None:
        added = tokenizer.added_tokens_decoder
        read = used_tokens(answers, [token.content for token in added.values()])
        known["format"] = "template"
        known["knows_tools"] = CALLS in answers.fields and "tools" in str(tokenizer.chat_template)
        known["hidden"] = frozenset(i for i in known["hidden"] if added[i].content not in read)
    return Loaded(model=model, image_processor=_image_processor(options, config), answers=answers, **known)


def _load_arguments(options: Options, config: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"dtype": options.dtype, "local_files_only": True}
    if options.attention != "auto":
        arguments["attn_implementation"] = options.attention
    if options.device == "cuda":
        arguments["device_map"] = options.device_map
        if options.max_memory is not None:
            arguments["max_memory"] = dict(enumerate(options.max_memory))
    if (quantization := _quantization_config(options, config)) is not None:
        arguments["quantization_config"] = quantization
    return arguments


def _quantization_config(options: Options, config: Any) -> Any:
    """The configuration that quantises or dequantises the weights; None: keep them as stored."""
    stored = getattr(config, "quantization_config", None) or {}
    method = stored.get("quant_method") if isinstance(stored, Mapping) else stored.quant_method
    if options.quantization != "none":
        _check_kernels(str(method or options.quantization).partition("-")[0], options.name)
    match options.quantization:
        case "bitsandbytes-8bit":
            return transformers.BitsAndBytesConfig(load_in_8bit=True)
        case "bitsandbytes-4bit":
            return transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            )
        case "fp8" if method != "fp8":
            return transformers.FineGrainedFP8Config()
        case "mxfp4" if method != "mxfp4":
            return transformers.Mxfp4Config()
        case "none" if method == "mxfp4":
            return transformers.Mxfp4Config(dequantize=True)
        case "none" if method == "fp8":
            return transformers.FineGrainedFP8Config(dequantize=True)
        case _:
            return None


def _check_kernels(method: str, model: str) -> None:
    """Raises SystemExit if transformers would fail later, or silently dequantise the weights to several times their size."""
    if method == "bitsandbytes" and importlib.util.find_spec("bitsandbytes") is None:
        raise SystemExit(
            f"quantization: {method} needs the package bitsandbytes, which this environment doesn't have."
            f" Install the one for CUDA ({INSTALL}), or choose another quantization."
        )
    if method not in KERNELS:
        return
    if not is_kernels_available():
        raise SystemExit(
            f"quantization: {method} needs the package {PACKAGE}, which this environment doesn't have."
            f" Install the one for CUDA ({INSTALL}), or set quantization: none."
        )
    for kernel in KERNELS[method]:
        try:
            get_kernel(kernel.repo, version=kernel.version)
        except Exception as error:
            raise SystemExit(
                f"quantization: {method} needs the kernel {kernel.repo}, version {kernel.version}, which can't be loaded."
                f" Get it (llmux pull {model}), or set quantization: none. The reason: {error}"
            ) from error
    if method == "fp8":
        if torch.cuda.get_device_capability() < (8, 9):
            raise SystemExit(
                "quantization: fp8 needs a GPU of compute capability 8.9 or more; use another, or set quantization: none."
            )
        os.environ["TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR"] = "1"  # otherwise every layer asks for one more kernel


def _image_processor(options: Options, config: Any) -> Any:
    if not (Path(options.path) / "preprocessor_config.json").is_file() or not hasattr(config, "image_token_id"):
        return None
    processor = transformers.AutoImageProcessor.from_pretrained(options.path)
    if options.image_pixels is not None:
        size = processor.size
        processor.size = {**size, "longest_edge": max(options.image_pixels, size["shortest_edge"])}
    return processor if hasattr(processor, "merge_size") else None
