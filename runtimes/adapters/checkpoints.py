"""Hugging Face model folders, read without loading the model: configuration, weights, chat template.

Only config.json and the JSON header of each safetensors file are read, which lists every tensor's type, shape and size. An
adapter adds its estimate up from parts, most of them in kv_cache.py:

    folder = checkpoints.read(path)                     # raises ModelUnusableError
    folder.weights.bytes_as(folder.config.dtype)        # once loaded in that type
    cache_bytes(layer_caches(folder.config, value_bytes=2), tokens=8192, sequences=4)
    activation_bytes(folder.config, tokens=2048, value_bytes=2)
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pydantic import JsonValue

from runtimes.base import ModelUnusableError
from runtimes.shared.regular import open_regular

HEADER_LIMIT: Final = 100 * 1024 * 1024  # the limit of the safetensors format
JSON_LIMIT: Final = 64 * 1024 * 1024  # the largest files that come with models have some 30 MiB
INDEX: Final = "model.safetensors.index.json"
BITS: Final = MappingProxyType(
    {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16}
    | {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
)
"""Bits of a value, by the name that safetensors files give its type."""

VALUE_BYTES: Final = MappingProxyType(
    {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
)
"""Bytes of a value, by the name that configurations give its type."""

_CONVERTED_TYPES: Final = ("F64", "F32", "F16", "BF16")  # types that are converted when the model is loaded in another


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of one model. `by_type`: bytes by safetensors' type names, empty where only the file sizes are known."""

    file_bytes: int
    by_type: Mapping[str, int]
    tensors: int = 0

    @property
    def lists_tensors(self) -> bool:
        """Whether the tensors were listed; if not, only `file_bytes` is known."""
        return bool(self.by_type)

    def bytes_as(self, dtype: str | None) -> int:
        """Bytes once loaded in `dtype` (a name of VALUE_BYTES; None: as stored).

        Floating-point weights are converted; quantised ones, of any other type, stay as stored.
        """
        width = VALUE_BYTES.get(dtype or "")
        if not self.lists_tensors:
            return self.file_bytes
        if width is None:
            return sum(self.by_type.values())
        return sum(
            size * 8 * width // BITS[kind] if kind in _CONVERTED_TYPES else size for kind, size in self.by_type.items()
        )


@dataclass(frozen=True, slots=True)
class Config:
    """config.json. `text` is the part for the language model: `text_config` of a multimodal model, else the whole."""

    values: Mapping[str, JsonValue]
    text: Mapping[str, JsonValue]

    def number(self, *names: str, default: int = 0) -> int:
        """The first integer among these fields of the language model."""
        for name in names:
            value = self.text.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return default

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings, from the language model's part or the whole; empty if missing."""
        value = self.text.get(name, self.values.get(name))
        return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()

    @property
    def architectures(self) -> tuple[str, ...]:
        """Class names in transformers, such as Qwen3ForCausalLM."""
        value = self.values.get("architectures")
        return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()

    @property
    def model_type(self) -> str:
        """The model family, as transformers names it; of the whole model."""
        value = self.values.get("model_type")
        return value if isinstance(value, str) else ""

    @property
    def dtype(self) -> str | None:
        """The type of the saved weights, such as bfloat16."""
        for part in (self.values, self.text):
            for name in ("dtype", "torch_dtype"):
                if isinstance(value := part.get(name), str):
                    return value.removeprefix("torch.")
        return None

    @property
    def context(self) -> int | None:
        """Maximum tokens of one sequence."""
        own = self.number("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length")
        return own or self.number("seq_length", "max_seq_len", "n_ctx") or None

    @property
    def takes_images(self) -> bool:
        """Does the model take images?"""
        return any(isinstance(self.values.get(name), dict) for name in ("vision_config", "visual")) or (
            isinstance(self.values.get("mm_vision_tower"), str)
        )

    @property
    def takes_audio(self) -> bool:
        """Does the model take audio?"""
        if isinstance(self.values.get("audio_config"), dict) or "num_mel_bins" in self.values:
            return True
        return isinstance(self.values.get("thinker_config"), dict)

    @property
    def quantization(self) -> str | None:
        """The quantisation method of its weights, such as mxfp4; None for plain weights."""
        for part in (self.values, self.text):
            if isinstance(found := part.get("quantization_config") or part.get("compression_config"), dict):
                method = found.get("quant_method") or found.get("quant_algo")
                return str(method) if method else "unknown"
        return None

    @property
    def heads(self) -> int:
        """Attention heads per layer."""
        return self.number(
            "num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "n_heads", default=1
        )

    @property
    def width(self) -> int:
        """Size of the residual stream."""
        return self.number("hidden_size", "d_model", "n_embd", "dim")

    @property
    def layers(self) -> int:
        """Layers of the language model; of an encoder-decoder, of its decoder."""
        return self.number("decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers")

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary."""
        return self.number("vocab_size")


@dataclass(frozen=True, slots=True)
class Folder:
    """A model folder."""

    path: Path
    config: Config
    weights: Weights


def read(path: Path) -> Folder:
    """The model in this folder. Blocks on reading a few file headers. Raises ModelUnusableError with the reason."""
    return Folder(path, config(path), weights(path))


def require_folder(path: Path) -> None:
    """Raises ModelUnusableError if the folder is missing, or the system refuses access to it."""
    try:
        is_there = path.is_dir()
    except OSError as error:
        raise ModelUnusableError(f"{path} can't be read: {error.strerror}") from error
    if not is_there:
        raise ModelUnusableError(f"{path}: there is no such folder")


def config(path: Path) -> Config:
    """The folder's config.json. Raises ModelUnusableError."""
    require_folder(path)
    file = path / "config.json"
    try:
        values = _load_json(file)
    except OSError as error:
        raise ModelUnusableError(
            f"{file} can't be read: {error.strerror}; is it a Hugging Face model folder?"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelUnusableError(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelUnusableError(f"{file} holds no JSON object")
    return config_of(values)


def config_of(values: Mapping[str, JsonValue]) -> Config:
    """The `Config` of a configuration that is already in memory."""
    text: Mapping[str, JsonValue] = values
    thinker = values.get("thinker_config")
    for part in (thinker, values):
        if not isinstance(part, Mapping):
            continue
        inner = next((part[name] for name in ("text_config", "llm_config", "decoder") if name in part), None)
        if isinstance(inner, Mapping):
            text = inner
            break
    return Config(values, text)


def chat_template(path: Path) -> str | None:
    """The folder's template that renders conversations; None for a model without one."""
    with contextlib.suppress(OSError):
        return (path / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = json_object(path / name).get("chat_template")
        if isinstance(found, list):  # several, by name
            named = [item for item in found if isinstance(item, dict)]
            found = next((item.get("template") for item in named if item.get("name") == "default"), None)
        if isinstance(found, str):
            return found
    return None


def template_in(path: Path) -> str | None:
    """The result for `Adapter.chat_template`: empty for a folder without a template, None without a folder."""
    return (chat_template(path) or "") if path.is_dir() else None


def weights(path: Path) -> Weights:
    """The folder's tensors: of the files in its index, else of all safetensors files, else the size of PyTorch's files.

    Raises ModelUnusableError without any, or when a file is missing, truncated, or not in the format of its suffix.
    """
    files = _indexed_files(path) or sorted(
        file for file in path.glob("*.safetensors") if not file.name.startswith(("consolidated", "adapter_"))
    )
    if files:
        by_type: dict[str, int] = {}
        tensors = total = 0
        for file in files:
            total += file.stat().st_size if file.is_file() else 0
            for kind, size in tensor_sizes(file):
                tensors += 1
                by_type[kind] = by_type.get(kind, 0) + size
        return Weights(total, by_type, tensors)
    others = [file for pattern in ("pytorch_model*.bin", "consolidated*.safetensors") for file in path.glob(pattern)]
    if not others:
        raise ModelUnusableError(f"{path}: there are no weights in it (*.safetensors)")
    return Weights(sum(file.stat().st_size for file in others), {})


def _indexed_files(path: Path) -> list[Path]:
    """The files of a sharded model; the folder may hold other files too."""
    mapping = json_object(path / INDEX).get("weight_map")
    if not isinstance(mapping, dict):
        return []
    names = sorted({str(name) for name in mapping.values()})
    if strange := [name for name in names if "/" in name or "\0" in name]:
        raise ModelUnusableError(f"{path / INDEX}: {strange[0]!r} is no name of a file beside it")
    return [path / name for name in names]


def tensor_sizes(file: Path) -> list[tuple[str, int]]:
    """Type and bytes of each tensor of a safetensors file. Raises ModelUnusableError."""
    try:
        with open_regular(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= HEADER_LIMIT:
                raise ModelUnusableError(f"{file} is not a safetensors file")
            head = json.loads(stream.read(length))
            end = stream.seek(0, 2)
        offsets = {name: (item["dtype"], item["data_offsets"]) for name, item in head.items() if name != "__metadata__"}
        sizes = [(str(kind), int(last) - int(first)) for kind, (first, last) in offsets.values()]
        if any(size < 0 for _, size in sizes):
            raise ModelUnusableError(f"{file} is not a safetensors file")
    except FileNotFoundError as error:
        raise ModelUnusableError(f"{file}: there is no such file") from error
    except OSError as error:
        raise ModelUnusableError(f"{file} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelUnusableError(f"{file} is not a safetensors file") from error
    if end < 8 + length + sum(size for _, size in sizes):
        raise ModelUnusableError(f"{file} is cut off: its tensors need {8 + length + sum(s for _, s in sizes)} bytes")
    return sizes


def json_object(file: Path) -> Mapping[str, JsonValue]:
    """The JSON object in a file of a model; empty without one. Blocks on the file."""
    try:
        value = _load_json(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _load_json(file: Path) -> JsonValue:
    """The JSON in a file. Raises OSError, ValueError and RecursionError."""
    with open_regular(file) as stream:
        text = stream.read(JSON_LIMIT + 1)
    if len(text) > JSON_LIMIT:
        raise ValueError(f"it is larger than {JSON_LIMIT >> 20} MiB")
    value: JsonValue = json.loads(text)
    return value
