"""The keys of a model's configuration that every runtime has. Adapters subclass `ModelConfig` with their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from runtimes.adapters.options import Options

ModelType = Literal["llm", "asr", "tts", "image", "vision", "embedding"]
Modality = Literal["text", "image", "audio"]
PromptFormatName = Literal[
    "generic",
    "mistral_template",
    "qwen3_template",
    "gemma4_template",
    "translategemma_template",
    "chatml",
    "alpaca",
    "raw",
]

ANOTHER_NAME = "remove it: another name for a model is a virtual model, virtual_models: {NAME: {model: THIS-MODEL}}"
"""For keys that named the model to its program: answers always have the name in the request."""

PLACEMENT = (
    *("priority", "pin", "preload", "keep_alive_s", "hold_s", "drain_s", "vram_mib", "devices", "target_inflight"),
    *("max_queue", "replicas", "replica_max"),
    *("public", "enabled", "source", "prompt_format", "keep_bodies"),
)
"""Keys of every model for scheduling, placement and visibility. They don't change the worker's memory."""

PATIENCE = ("startup_timeout_s", "startup_limit_s", "grace_s", "probe")
"""Keys of every model for timeouts and probes. They don't change the worker's memory."""


Gpus = Annotated[int, Field(ge=1, le=16)] | Literal["auto"]


class Source(BaseModel):
    """Where a model's files come from, for `llmux pull`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    repo: str = Field(
        pattern=r"^\w[\w.-]*(/\w[\w.-]*)?$",
        description="Repository on the model hub.",
        examples=["Qwen/Qwen3-0.6B"],
    )
    revision: str = Field(default="main", min_length=1, description="Branch, tag or commit.")
    files: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Names of files, or patterns. Default: all; where there are safetensors, no other weights.",
    )


class ModelConfig(BaseModel):
    """The keys every model has, whatever its runtime. Adapters subclass it with their own keys.

    Strict: unknown keys and wrong types are errors. Paths are expanded (`~`, `$VAR`) by the catalog before validation.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    former_keys: ClassVar[Options] = {}  # keys that there were, and the options that stand in `extra_args` instead
    removed_keys: ClassVar[Mapping[str, str]] = {}  # former keys that no option replaces → what to do

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """The command line options of the runtime's program that have a key here: option → key."""
        return {}

    @classmethod
    def source_of(cls, values: Mapping[str, object]) -> Source | None:  # noqa: ARG003  # for those that have names
        """The source for a short name among these keys, such as `model: small`; None: no key is a short name."""
        return None

    runtime: str = Field(description="The runtime that serves this model.", examples=["llama_server"])
    source: Source | None = Field(
        default=None,
        description="Where `llmux pull` gets its files; then `path` may be left out: below `server.models_dir`.",
    )
    type: ModelType = Field(default="llm", description="What the model is for; decides its default priority.")
    priority: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Eviction priority; the lowest goes first. Default by type: asr 300, tts 200, image 150, vision 130, embedding 120, llm 100.",
    )
    pin: bool = Field(default=False, description="Never evict it.")
    preload: bool = Field(default=False, description="Load it when the daemon starts.")
    keep_alive_s: Annotated[float, Field(gt=0)] | Literal["forever"] | None = Field(
        default=None,
        description="Unload after this many idle seconds; no less urgent request evicts it before. `forever`: unload only "
        "when the memory is needed. Default: `limits.keep_alive`.",
        examples=[900, "forever"],
    )
    hold_s: float = Field(
        default=0.0,
        ge=0,
        le=86_400,
        description="After each request, no model of equal or lower priority evicts it for so many seconds.",
        examples=[20],
    )
    vram_mib: int | None = Field(
        default=None, gt=0, description="Memory it takes, in MiB. Default: learned, else estimated from its files."
    )
    devices: list[str] = Field(default_factory=list, description="Devices it may run on. Default: any.")
    gpus: Gpus = Field(
        default=1,
        description="GPUs that share one worker, each with an equal part of its memory; `auto`: one GPU where one can have it "
        "whole, else as few as suffice, each with a part in proportion to what is free there, less 512 MiB. Without meaning "
        "on host memory. Default: `auto` for llama_server, llama_cpp, transformers' language models, exllamav3 and tabbyapi, "
        "unless other keys say where their layers go.",
        examples=[2, "auto"],
    )
    target_inflight: int | None = Field(
        default=None,
        ge=0,
        description="Requests one worker gets at once; 0: no limit. Default: what the runtime serves.",
    )
    replicas: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Workers that are loaded when one is, where memory is free. They share one queue.",
        examples=[2],
    )
    replica_max: int | None = Field(
        default=None,
        ge=1,
        le=16,
        description="Workers at most: further ones are loaded while requests wait and memory is free. Default: `replicas`.",
        examples=[4],
    )
    max_queue: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None, description="Requests that may wait for it. Default: `limits.queue_per_model`.", examples=[8]
    )
    drain_s: Annotated[float, Field(ge=0, le=86_400)] | Literal["never"] | None = Field(
        default=None,
        description="Time its running requests get before it is stopped; `never`: none is cut for another model. "
        "Default: `limits.drain_s`.",
        examples=[600, "never"],
    )
    modalities: list[Modality] = Field(default=["text"], description="What the model takes as input.")
    prompt_format: PromptFormatName | None = Field(
        default=None,
        description="How conversations become prompts. Default: by the worker, with the model's own chat template. `generic` and "
        "the formats of Mistral, Qwen3 and Gemma 4 use that as well where it is one of theirs; otherwise llmux writes the "
        "prompt, and the worker completes it.",
        examples=["qwen3_template"],
    )
    env: dict[str, str] = Field(default_factory=dict, description="Further environment variables for the worker.")
    startup_timeout_s: float = Field(
        default=300.0, gt=0, description="Give up a start after this long without any progress (log, reads, memory)."
    )
    startup_limit_s: float = Field(
        default=1800.0, gt=0, description="Give up a start after this long, progress or not."
    )
    grace_s: float = Field(default=10.0, ge=0, description="Seconds between SIGTERM and SIGKILL when it is stopped.")
    probe: Literal["health", "inference"] = Field(
        default="health",
        description="inference: beside its health check, ask an idle worker for one token each `limits.liveness_interval_s`, "
        "and replace it when six in a row fail.",
        examples=["inference"],
    )
    public: bool | None = Field(
        default=None,
        description="List it under its own name? Default: only where no virtual model refers to it.",
    )
    enabled: bool = Field(default=True, description="False: as if it were not in the file.")

    keep_bodies: bool = Field(
        default=False,
        description="Keep the bodies of its last 100 requests and their answers on disk, for the scope `admin` to look at: 64 KiB of "
        "each, without media and what is named like a secret.",
    )

    @property
    def equal_gpus(self) -> int:
        """The number of GPUs that share the model equally; 1 if the model takes as many GPUs as it needs."""
        return 1 if self.gpus == "auto" else self.gpus

    @property
    def most_replicas(self) -> int:
        """The highest number of workers."""
        return self.replica_max or self.replicas

    @model_validator(mode="after")
    def _replicas(self) -> Self:
        if self.replica_max is not None and self.replica_max < self.replicas:
            raise ValueError(f"replica_max is {self.replica_max}, and replicas is {self.replicas}: make it no smaller")
        return self


class DividedConfig(ModelConfig):
    """The keys of a runtime whose workers put whole layers on each GPU: a model may go over several unless it is said otherwise."""

    gpus: Gpus = Field(default="auto", description=ModelConfig.model_fields["gpus"].description)

    def says_where(self) -> bool:
        """Do other keys divide the model among GPUs, or limit it to one GPU?"""
        return False

    @model_validator(mode="after")
    def _on_one(self) -> Self:
        if "gpus" not in self.model_fields_set and self.says_where():
            self.__dict__["gpus"] = 1  # not as if the file said so
        return self
