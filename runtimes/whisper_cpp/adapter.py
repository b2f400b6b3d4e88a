"""Whisper on whisper.cpp's own server, `whisper-server`: CPUs, and whatever GPU it was built for.

Which program: the configured `binary`, else `whisper-server` on PATH. No registry has it for Linux; it is built from
whisper.cpp's source. A worker of ours runs it (worker.py): the server knows few kinds of files, no key, and
answers in a dialect of its own.
"""

from __future__ import annotations

import dataclasses
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters import speech_recognition, whisper_sizes
from runtimes.adapters.options import refused_options
from runtimes.adapters.server_program import FilePath, runnable
from runtimes.adapters.speech_recognition import MAX_AUDIO_S, DefaultLanguage, MaxAudio
from runtimes.adapters.whisper_sizes import Size
from runtimes.adapters.worker_adapter import WorkerAdapter, WorkerConfig
from runtimes.base import Capabilities, Contradiction, LaunchContext, LaunchSpec, ModelUnusableError
from runtimes.estimate import MIB, Estimate
from runtimes.model_config import Modality, Source
from runtimes.shared.regular import open_regular

PROGRAM: Final = "whisper-server"
MAGIC: Final = 0x67676D6C
MULTILINGUAL: Final = 51_865  # words of the vocabulary, from which on it has several languages
PROGRAM_MIB: Final = 105  # our worker, whisper.cpp, and the sound of a piece
DECODERS: Final = 5  # as many texts at once, at most, unless more beams are wanted

OWN_OPTIONS: Final = frozenset(
    [
        "-m",
        "--model",
        "--host",
        "--port",
        "--inference-path",
        "--request-path",
        "--public",
        "--convert",
        "--tmp-dir",
        "-dl",
        "--detect-language",
        "-h",
        "--help",
    ]
)
KEYS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("-t", "--threads"), "threads"),
    **dict.fromkeys(("-bs", "--beam-size"), "beam_size"),
    **dict.fromkeys(("-vm", "--vad-model", "--vad"), "vad_model"),
    **dict.fromkeys(("-l", "--language"), "default_language"),
    **dict.fromkeys(("-ng", "--no-gpu"), "devices"),
}


class WhisperCppConfig(WorkerConfig):
    """A Whisper model in whisper.cpp's format."""

    type: Literal["asr"] = Field(default="asr", description="What the model is for: speech recognition.")
    modalities: list[Modality] = Field(default=["audio"], description="What the model takes as input.")
    parallel: int = Field(default=1, ge=1, le=1, description="Requests at once: whisper.cpp's server does one.")
    path: FilePath = Field(description="The model's file, as ggml-small.bin.")
    model: Size | None = Field(
        default=None,
        description="Its size instead of its path: `llmux pull` gets the file, to below `server.models_dir`. `large` is "
        "large-v3, `turbo` large-v3-turbo.",
        examples=["small"],
    )
    quantization: Literal["q5_0", "q5_1", "q8_0"] | None = Field(
        default=None,
        description="With `model`: which of its quantised files. Small sizes have q5_1, from medium on q5_0, most q8_0.",
    )
    binary: FilePath | None = Field(default=None, description=f"The server program. Default: {PROGRAM} on PATH.")
    library_path: list[FilePath] = Field(default_factory=list, description="Folders put before LD_LIBRARY_PATH.")
    beam_size: int | None = Field(default=None, ge=1, le=20, description="Beams of the search. Default: greedy.")
    vad_model: FilePath | None = Field(
        default=None, description="A model (ggml-silero-*.bin) that finds speech: what holds none is left out."
    )
    default_language: DefaultLanguage = None
    max_audio_s: MaxAudio = MAX_AUDIO_S
    extra_args: list[str] = Field(default_factory=list, description="Further command line options of the server.")

    @classmethod
    def source_of(cls, values: Mapping[str, object]) -> Source | None:
        """The file of a size."""
        size, quantization = values.get("model"), values.get("quantization")
        if not isinstance(size, str) or size not in whisper_sizes.SIZES:
            return None
        return whisper_sizes.ggml(size, quantization if isinstance(quantization, str) else None)

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """Every option that has a key of its own."""
        return KEYS


class WhisperCppAdapter(WorkerAdapter[WhisperCppConfig]):
    """One process of ours and one of whisper.cpp for each model."""

    name = "whisper_cpp"
    summary = "Speech recognition: Whisper models on whisper.cpp's own server."
    all_endpoints = speech_recognition.ENDPOINTS
    requirements = Path(__file__).parent / "requirements.lock"
    config = WhisperCppConfig
    overridable_keys = ("threads", "beam_size", "default_language", "max_audio_s")
    program = "runtimes.whisper_cpp.worker"

    def problems(self, config: WhisperCppConfig) -> Iterator[str]:
        """A file that is no such model, an unknown language, options that llmux sets."""
        return _problems(config)

    def options(self, config: WhisperCppConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """Raises ModelUnusableError without a program or a model."""
        header = read(config.path)
        argv = [
            str(_program(config)),
            "--model",
            str(config.path),
            "--language",
            "auto" if header.multilingual else "en",
        ]
        argv += [] if config.threads is None else ["--threads", str(config.threads)]
        argv += [] if config.beam_size is None else ["--beam-size", str(config.beam_size)]
        argv += [] if config.vad_model is None else ["--vad", "--vad-model", str(config.vad_model)]
        argv += [] if context.device.kind.accelerates else ["--no-gpu"]
        return {
            "argv": [*argv, *config.extra_args],
            "multilingual": header.multilingual,
            **speech_recognition.options(config.default_language, config.max_audio_s),
        }

    def launch(self, config: WhisperCppConfig, context: LaunchContext) -> LaunchSpec:
        """Raises RuntimeNotInstalledError, or ModelUnusableError."""
        spec = super().launch(config, context)
        return dataclasses.replace(spec, library_path=tuple(map(str, config.library_path)))

    def estimate(self, config: WhisperCppConfig) -> Estimate | None:
        """Weights as they are stored, caches and buffers by the file's header; None if it can't be read."""
        try:
            header = read(config.path)
        except ModelUnusableError:
            return None
        return Estimate.of(
            {"weights": config.path.stat().st_size, "work": header.work(config.beam_size), "program": PROGRAM_MIB * MIB}
        )

    def weights(self, config: WhisperCppConfig) -> tuple[Path, ...]:
        """The one file."""
        return (config.path,)

    def known_as(self, config: WhisperCppConfig) -> tuple[str, ...]:
        """By its size."""
        return whisper_sizes.names(config.model)

    def inputs(self, config: WhisperCppConfig) -> frozenset[Modality]:
        """Audio."""
        return frozenset({"audio"})

    def capabilities(self, config: WhisperCppConfig) -> Capabilities:
        """Those of speech recognition."""
        return speech_recognition.CAPABILITIES


@dataclass(frozen=True, slots=True)
class Header:
    """The sizes at the beginning of a model's file."""

    vocabulary: int
    frames: int
    width: int
    layers: int  # of the encoder
    positions: int
    text_width: int
    text_layers: int

    @property
    def multilingual(self) -> bool:
        """Does it know more than English?"""
        return self.vocabulary >= MULTILINGUAL

    def work(self, beams: int | None) -> int:
        """Bytes of caches (float16) and buffers (float32), as whisper.cpp's log lists them.

        - keys and values of the text so far for each decoder, and of the encoder's output;
        - the encoder: the widest layer's activations of all frames;
        - the decoder: logits of a batch as long as the text may be.
        """
        decoders = max(beams or 0, DECODERS)
        caches = 2 * 2 * self.text_width * self.text_layers * (self.positions * (decoders + 1) // 2 + self.frames)
        encoder = 4 * self.frames * self.width * 12
        return caches + encoder + 4 * self.vocabulary * self.positions // 8


def read(path: Path) -> Header:
    """Blocks on a few bytes. Raises ModelUnusableError with the reason."""
    try:
        with open_regular(path) as file:
            magic, vocabulary, frames, width, _, layers, positions, text_width, _, text_layers = struct.unpack(
                "<10i", file.read(40)
            )
    except FileNotFoundError as error:
        raise ModelUnusableError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ModelUnusableError(f"{path} can't be read: {error.strerror}") from error
    except struct.error as error:
        raise ModelUnusableError(f"{path} is cut off, or not a model of whisper.cpp") from error
    if magic != MAGIC:
        raise ModelUnusableError(f"{path} is not a model of whisper.cpp (ggml-NAME.bin)")
    return Header(vocabulary, frames, width, layers, positions, text_width, text_layers)


def _program(config: WhisperCppConfig) -> Path:
    """Raises ModelUnusableError."""
    if config.binary is not None:
        return runnable("binary", config.binary)
    if (found := shutil.which(PROGRAM)) is None:
        raise ModelUnusableError(
            f"binary: {PROGRAM} is not on PATH; build it from whisper.cpp's source (cmake -B build && cmake --build build "
            f"--target {PROGRAM}) and set binary to where it is"
        )
    return Path(found).absolute()


def _problems(config: WhisperCppConfig) -> Iterator[str]:
    try:
        read(config.path)
    except ModelUnusableError as error:
        yield f"path: {error}"
    try:
        _program(config)
    except ModelUnusableError as error:
        yield str(error)
    if config.vad_model is not None and not config.vad_model.is_file():
        yield f"vad_model: {config.vad_model}: there is no such file"
    yield from speech_recognition.problems(config.default_language)
    for problem in refused_options(config.extra_args, OWN_OPTIONS, KEYS):
        yield Contradiction(f"extra_args: {problem}")
