"""Chatterbox text to speech: a checkpoint folder, one of three variants, and a folder of reference clips as voices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters import checkpoints
from runtimes.adapters.worker_adapter import ModelPath, WorkerAdapter, WorkerConfig
from runtimes.base import Capabilities, Contradiction, Endpoint, LaunchContext, ModelUnusableError
from runtimes.chatterbox.shared import languages, voices
from runtimes.estimate import MIB, Estimate
from runtimes.model_config import ModelType
from runtimes.shared.languages import code_of

PROGRAM_MIB: Final = 900  # Python, torch, transformers, librosa, the watermark's own network
LISTENERS: Final = 8  # concurrent requests: the model takes their sentences in turn
WORK_MIB: Final = 400  # activations, the token model's cache, the vocoder's buffers of a long sentence

Variant = Literal["default", "multilingual", "turbo"]

WEIGHTS: Final = MappingProxyType(
    {
        "default": ("t3_cfg.safetensors", "s3gen.safetensors", "ve.safetensors"),
        "multilingual": ("t3_mtl23ls_v2.safetensors", "s3gen.pt", "ve.pt"),
        "turbo": ("t3_turbo_v1.safetensors", "s3gen_meanflow.safetensors", "ve.safetensors"),
    }
)
"""The files that the library loads for each variant."""

OTHERS: Final = MappingProxyType(
    {
        "default": ("tokenizer.json",),
        "multilingual": ("grapheme_mtl_merged_expanded_v1.json", "Cangjie5_TC.json"),
        "turbo": ("tokenizer_config.json",),
    }
)


class ChatterboxConfig(WorkerConfig):
    """A voice that reads text aloud."""

    type: ModelType = Field(default="tts", description="What the model is for; decides its default priority.")
    path: ModelPath = Field(description="The checkpoint's folder.", examples=["/models/chatterbox"])
    variant: Variant = Field(default="default", description="Which of the three models in the folder.")
    voices: ModelPath | None = Field(
        default=None,
        description="A folder of reference clips (wav, flac, mp3, ogg; turbo: over 5 s): anna.wav is the voice anna.",
        examples=["~/voices"],
    )
    default_voice: str | None = Field(
        default=None, description="The voice of requests without one. Default: the first clip, else the model's own."
    )
    voice_aliases: dict[str, str] = Field(
        default_factory=dict,
        description="Further names of voices, for clients that insist on OpenAI's.",
        examples=[{"alloy": "anna"}],
    )
    default_language: str = Field(
        default="en",
        description="multilingual: the language of requests without one, a code such as de, or its English name.",
    )


class ChatterboxAdapter(WorkerAdapter[ChatterboxConfig]):
    """Resemble AI's Chatterbox."""

    name = "chatterbox"
    summary = "Text to speech in cloned voices: Chatterbox default, multilingual and turbo."
    all_endpoints = frozenset({Endpoint("/v1/audio/speech")})
    overridable_keys = ("threads", "default_language")
    program = "runtimes.chatterbox.worker"
    requirements = Path(__file__).parent / "requirements.lock"
    prune = ("torchaudio/lib/*.so",)  # made for another torch, and only its Python is used
    config = ChatterboxConfig

    def problems(self, config: ChatterboxConfig) -> Iterator[str]:
        """Problems of missing files and voices."""
        return _problems(config)

    def options(self, config: ChatterboxConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """The worker's own settings. Raises ModelUnusableError where `check` finds a problem."""
        return {
            "path": str(config.path),
            "variant": config.variant,
            "voices": None if config.voices is None else str(config.voices),
            "default_voice": config.default_voice,
            "aliases": dict(config.voice_aliases),
            "default_language": config.default_language,
            "device": context.device.kind.accelerator,
        }

    def target_inflight(self, config: ChatterboxConfig) -> int:
        """More than one: most of the time, a request waits for its client to play the audio."""
        return LISTENERS if config.target_inflight is None else config.target_inflight

    def voices(self, config: ChatterboxConfig) -> tuple[str, ...]:
        """The names of all clips, of the model's own voice, and the aliases."""
        return tuple(voices.voice_names(config.path, config.voices, config.voice_aliases))

    def estimate(self, config: ChatterboxConfig) -> Estimate | None:
        """The weights by the files' headers (or sizes), the work on a long sentence, and the program."""
        try:
            size = sum(_weight_bytes(config.path / name) for name in WEIGHTS[config.variant])
        except (ModelUnusableError, OSError):
            return None
        return Estimate.of({"weights": size, "one sentence": WORK_MIB * MIB, "program": PROGRAM_MIB * MIB})

    def capabilities(self, config: ChatterboxConfig) -> Capabilities:
        """The model takes text only."""
        return Capabilities(("text",), tools=False, thinking=False, multi_turn=False)


def _weight_bytes(file: Path) -> int:
    if file.suffix == ".safetensors":
        return sum(size for _, size in checkpoints.tensor_sizes(file))
    return file.stat().st_size


def _problems(config: ChatterboxConfig) -> Iterator[str]:
    known = languages.LANGUAGES if config.variant == "multilingual" else ("en",)
    if code_of(config.default_language, known) is None:
        which = languages.valid_codes(config.default_language, known)
        yield Contradiction(
            f"default_language: {config.default_language!r} can't be spoken by variant {config.variant}; it must be {which}"
        )
    if not config.path.is_dir():
        yield f"path: {config.path}: there is no such folder"
        return
    missing = [
        name for name in (*WEIGHTS[config.variant], *OTHERS[config.variant]) if not (config.path / name).is_file()
    ]
    if missing:
        yield f"path: {config.path} lacks {', '.join(missing)}, which variant {config.variant} is made of"
    if config.voices is not None and not config.voices.is_dir():
        yield f"voices: {config.voices}: there is no such folder"
    voice_names = voices.voice_names(config.path, config.voices, {})
    if not voice_names:
        yield "voices: there is no voice: name a folder with at least one clip (the checkpoint has none of its own)"
        return
    named = {f"voice_aliases: {alias}": voice for alias, voice in config.voice_aliases.items()}
    for key, voice in {"default_voice": config.default_voice, **named}.items():
        if voice is not None and voice not in voice_names:
            yield f"{key}: there is no voice {voice!r}; there are {', '.join(voice_names)}"
