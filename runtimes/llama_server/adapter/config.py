"""The configuration keys of a llama_server model, and the option of each key.

`settings()` derives one dictionary from the configuration. The binary gets it as command line options (`FLAGS`), the embedded
server as one JSON object for worker/launcher.py. So both understand the same keys. In `extra_args`, the embedded server
understands options that used to be keys; all other options need the binary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue

from runtimes.adapters import options
from runtimes.adapters.options import Options, keys_of, of_keys
from runtimes.model_config import ANOTHER_NAME, DividedConfig, ModelConfig

SLOTS = 4
"""The default number of requests that a worker generates at once."""

ALL_LAYERS = 999
"""More layers than any model has. Older programs don't know `all`, but all programs take a large number."""


def _switch(value: object) -> object:
    """YAML reads a bare `on` or `off` as a boolean."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


FilePath = Annotated[Path, Field(strict=False)]
Switch = Annotated[Literal["on", "off", "auto"], BeforeValidator(_switch)]
Layers = Annotated[int, Field(ge=-1)] | Literal["all"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
SpecType = Literal[
    "none",
    "draft-simple",
    "draft-eagle3",
    "draft-mtp",
    "draft-dflash",
    "draft-dspark",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
]


class LlamaServerConfig(DividedConfig):
    """A GGUF model served by llama.cpp's own HTTP server."""

    former_keys: ClassVar = {
        **of_keys(("image_min_tokens", "reasoning_budget", "threads_batch", "load_mode")),
        **of_keys(("rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx")),
        **of_keys(("reasoning_format",)),
        "mmproj_offload": ("", "--no-mmproj-offload"),  # true: as the device is
    }
    removed_keys: ClassVar = {
        "alias": ANOTHER_NAME,
        "embeddings": "write type: embedding, which serves embeddings, or remove it where it is false",
    }

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """Every spelling of an option that has a configuration key."""
        keys = {option: key for option, key in KEY_OF_OPTION.items() if key not in cls.former_keys}
        return {option: "type" if key == "embeddings" else key for option, key in keys.items()}

    def says_where(self) -> bool:
        """Do llama.cpp's options without a key divide the model among GPUs?"""
        return any(word.partition("=")[0] in _PLACING for word in self.extra_args)

    path: FilePath = Field(description="The GGUF file; of a split model its first part.")
    program: Literal["auto", "binary", "embedded"] = Field(
        default="auto",
        description="Which server runs it. auto: `binary` if set, else the one compiled for a GPU, "
        "else llama-server on PATH, else the embedded one.",
    )
    binary: FilePath | None = Field(default=None, description="The llama-server program. Default: found.")
    build: str | None = Field(
        default=None,
        pattern="^b[0-9]+$",
        description="The installed build of llama.cpp's releases that runs it (`llmux runtimes install llama_server --build`). "
        "Default: the one that the runtime uses.",
        examples=["b11146"],
    )
    library_path: list[FilePath] = Field(
        default_factory=list, description="Folders put before LD_LIBRARY_PATH, for builds with their own CUDA or GGML."
    )
    n_ctx: int | None = Field(
        default=None,
        ge=0,
        description="Context in tokens, shared by all slots; 0: what the model was trained with. "
        "Default: up to 32768, as the device has room; more where half of a GPU stays free.",
        examples=[32768],
    )
    n_gpu_layers: Layers = Field(
        default="all", description="Layers on the GPU; all or -1: every layer; 0: none. Host devices ignore it."
    )
    flash_attn: Switch = Field(default="auto", description="Flash attention.")
    cache_type_k: CacheType = Field(default="f16", description="Type of the KV cache's keys.")
    cache_type_v: CacheType = Field(
        default="f16", description="Type of the KV cache's values; a quantised one needs flash attention."
    )
    mmproj: FilePath | None = Field(default=None, description="Multimodal projector; gives the model images or audio.")
    image_max_tokens: int | None = Field(default=None, ge=1, description="Maximum tokens of an image.")
    draft_model: FilePath | None = Field(default=None, description="Draft model for speculative decoding.")
    spec_type: SpecType | Annotated[list[SpecType], Field(min_length=1)] | None = Field(
        default=None,
        description="Kind of speculative decoding, or several. Default: draft-simple with a draft_model, else none.",
    )
    spec_draft_n_max: int | None = Field(default=None, ge=0, description="Maximum tokens drafted at once (3).")
    spec_draft_p_min: float | None = Field(
        default=None, ge=0, le=1, description="Stop drafting below this probability."
    )
    spec_draft_ngl: Layers | None = Field(default=None, description="Layers of the draft model on the GPU.")
    reasoning: Switch = Field(default="auto", description="Thinking by default; auto: as the chat template says.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads for generation.")
    parallel: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="Slots: requests generated at once. Default: 4; fewer where less than 8192 tokens of a default `n_ctx` are there for each.",
        examples=[4],
    )
    kv_unified: bool = Field(
        default=True, description="Slots share one context; false: each slot has n_ctx / parallel tokens of its own."
    )
    batch_size: int | None = Field(
        default=None, ge=1, description="Logical batch size (2048; of embeddings and reranking, the physical one)."
    )
    ubatch_size: int | None = Field(
        default=None,
        ge=1,
        description="Physical batch size; decides buffer sizes. Default: 512; the context, where a text must be read in one piece.",
    )
    pooling: Literal["none", "mean", "cls", "last", "rank"] | None = Field(
        default=None, description="Pooling of embeddings. Default: what the file says, else mean."
    )
    rerank: bool = Field(default=False, description="Serve reranking instead of text.")
    jinja: bool = Field(default=True, description="Use the Jinja chat template engine.")
    chat_template: str | None = Field(default=None, description="Chat template (Jinja text or a built-in name).")
    chat_template_file: FilePath | None = Field(default=None, description="File with a chat template.")
    lora: list[FilePath] = Field(default_factory=list, description="LoRA adapters.")
    cache_ram_mib: int = Field(
        default=0, ge=0, description="Host memory for the prompts of earlier requests; counts into the footprint there."
    )
    extra_args: list[str] = Field(
        default_factory=list,
        description=f"Further command line options. The embedded server takes {', '.join(filter(None, keys_of(former_keys)))}; all others need a binary.",
    )


WORDS = frozenset(["load_mode", "rope_scaling", "reasoning_format"])
"""The former keys whose values are words."""

_PLACING = frozenset(["--tensor-split", "-ts", "--split-mode", "-sm", "--main-gpu", "-mg", "--device", "-dev"])
_NO_OPTION = {"path", "program", "binary", "build", "library_path", "extra_args"}
_KEYS = LlamaServerConfig.model_fields.keys() - ModelConfig.model_fields.keys() - _NO_OPTION

FLAGS: Options = MappingProxyType(
    {
        **of_keys(sorted(_KEYS | {"model", "host", "port", "alias"})),
        **LlamaServerConfig.former_keys,
        "mmproj_offload": ("--mmproj-offload", "--no-mmproj-offload"),
        "n_ctx": "--ctx-size",
        "draft_model": "--model-draft",
        "cache_ram_mib": "--cache-ram",
        "kv_unified": ("--kv-unified", "--no-kv-unified"),
        "jinja": ("--jinja", "--no-jinja"),
        "embeddings": ("--embeddings", None),
        "rerank": ("--rerank", None),
        "metrics": ("--metrics", None),
    }
)

_OTHER_SPELLINGS = {
    "-m": "model",
    "-a": "alias",
    "-c": "n_ctx",
    "-ngl": "n_gpu_layers",
    "--gpu-layers": "n_gpu_layers",
    "-fa": "flash_attn",
    "-ctk": "cache_type_k",
    "-ctv": "cache_type_v",
    "-mm": "mmproj",
    "-md": "draft_model",
    "--spec-draft-model": "draft_model",
    "--draft-p-min": "spec_draft_p_min",
    "-ngld": "spec_draft_ngl",
    "--gpu-layers-draft": "spec_draft_ngl",
    "--n-gpu-layers-draft": "spec_draft_ngl",
    "-rea": "reasoning",
    "-t": "threads",
    "-tb": "threads_batch",
    "-np": "parallel",
    "-kvu": "kv_unified",
    "-no-kvu": "kv_unified",
    "-b": "batch_size",
    "-ub": "ubatch_size",
    "-lm": "load_mode",
    "--embedding": "embeddings",
    "--reranking": "rerank",
    "-cram": "cache_ram_mib",
}

_OWN_OPTIONS = """
--host --port --reuse-port --api-prefix --api-key --api-key-file --model -m --alias -a --ssl-key-file --ssl-cert-file
--model-url -mu --docker-repo -dr --hf-repo -hf -hfr --hf-file -hff --models-dir --models-preset --sleep-idle-seconds
--media-path
"""
OWN_OPTIONS = frozenset(_OWN_OPTIONS.split())
"""Options that only llmux sets: they control access to the worker, its models, or the files that a request can read."""

KEY_OF_OPTION = MappingProxyType(keys_of(FLAGS) | _OTHER_SPELLINGS)
"""Every spelling of an option that has a key of its own, or had one."""


def serves(config: LlamaServerConfig) -> Literal["text", "embeddings", "rerank"]:
    """The kind of the worker's answers. A process of llama.cpp serves one kind only."""
    if config.rerank:
        return "rerank"
    return "embeddings" if config.type == "embedding" else "text"


def layers(value: int | str) -> int:
    """The number to pass for a `Layers` value."""
    return ALL_LAYERS if value in ("all", -1) else int(value)


def settings(config: LlamaServerConfig, *, on_gpu: bool, pooling: str | None) -> dict[str, JsonValue]:
    """Settings that differ from the program's defaults, or whose value must be certain.

    `pooling` is the effective value. Listening address and model name are not included: the launch adds them.
    """
    kind = serves(config)
    draft_layers = layers("all" if config.spec_draft_ngl is None else config.spec_draft_ngl)
    given = config.model_dump(mode="json", include=set(FLAGS))
    values: dict[str, JsonValue] = {
        **given,
        "model": str(config.path),
        "n_gpu_layers": layers(config.n_gpu_layers) if on_gpu else 0,
        "metrics": True,
        "mmproj_offload": on_gpu if config.mmproj else None,
        "spec_type": given["spec_type"] or ("draft-simple" if config.draft_model else None),
        "spec_draft_ngl": (draft_layers if on_gpu else 0) if config.draft_model else None,
        "embeddings": True if kind == "embeddings" else None,
        "rerank": True if kind == "rerank" else None,
        "pooling": pooling if kind == "embeddings" else None,
    }
    values["reasoning"] = None if values["reasoning"] == "auto" else values["reasoning"]
    return {key: value for key, value in values.items() if value not in (None, [])}


def embedded(words: Sequence[str]) -> tuple[dict[str, JsonValue], list[str]]:
    """The settings in `extra_args` that the embedded server supports, and the words that it doesn't support."""
    values: dict[str, JsonValue] = {}
    others: list[str] = []
    rest = list(words)
    while rest:
        option = rest.pop(0)
        key = KEY_OF_OPTION.get(option, "")
        if key not in LlamaServerConfig.former_keys:
            others.append(option)
        elif isinstance(FLAGS[key], tuple):
            values[key] = not option.startswith("--no-")
        elif rest:
            word = rest.pop(0)
            try:
                values[key] = word if key in WORDS else json.loads(word)
            except ValueError:
                others += [option, word]
    return values, others


def command_line(values: Mapping[str, JsonValue]) -> list[str]:
    """The settings as options of the llama-server program, which takes several files as one word with commas."""
    joined = {key: ",".join(map(_csv_quoted, value)) for key, value in values.items() if isinstance(value, list)}
    return options.command_line(FLAGS, {**values, **joined})


def _csv_quoted(item: JsonValue) -> str:
    text = str(item)
    return '"' + text.replace('"', '""') + '"' if "," in text or text.startswith('"') else text
