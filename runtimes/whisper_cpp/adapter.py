"""Whisper on whisper.cpp's own server, `whisper-server`: CPUs, and whatever GPU it was built for.

No package registry has it for Linux: users build it from whisper.cpp's source. Our own worker runs it (worker.py), because
the server supports few kinds of files, has no key, and answers in a dialect of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters import speech_recognition, whisper_sizes
from runtimes.adapters.server_program import FilePath, ServerAdapter, ServerConfig, option_problems
from runtimes.adapters.speech_recognition import MAX_AUDIO_S, DefaultLanguage, MaxAudio, WhisperAdapter
from runtimes.adapters.whisper_sizes import Size
from runtimes.adapters.worker_adapter import WorkerConfig
from runtimes.base import LaunchContext, LaunchSpec, ModelUnusableError
from runtimes.estimate import MIB, Estimate
from runtimes.model_config import Modality, Source
from runtimes.shared.regular import open_regular

PROGRAM: Final = "whisper-server"
MAGIC: Final = 0x67676D6C
HEADER: Final = "<4i8x2i4xi"  # the magic number, then the fields of `Header`, without heads and the encoder's layers
MULTILINGUAL: Final = 51_865  # words of the vocabulary, from which on it has several languages
PROGRAM_MIB: Final = 105  # our worker, whisper.cpp, and the sound of a piece
DECODERS: Final = 5  # as many texts at once, at most, unless more beams are wanted


class WhisperCppConfig(WorkerConfig, ServerConfig):
    """A Whisper model in whisper.cpp's format."""

    reserved = """
    -m --model --host --port --inference-path --request-path --public --convert --tmp-dir -dl --detect-language -h --help
    """
    no_options = ("quantization", "max_audio_s")
    renamed: ClassVar = {"default_language": "--language"}
    spellings: ClassVar = {
        "-t": "threads",
        "-bs": "beam_size",
        "-l": "default_language",
        **dict.fromkeys(("-vm", "--vad"), "vad_model"),
        **dict.fromkeys(("-ng", "--no-gpu"), "devices"),
    }

    type: Literal["asr"] = Field(default="asr", description="What the model is for: speech recognition.")
    modalities: list[Modality] = Field(default=["audio"], description="What the model takes as input.")
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
        """The file with the model of this size."""
        size, quantization = values.get("model"), values.get("quantization")
        if not isinstance(size, str) or size not in whisper_sizes.SIZES:
            return None
        return whisper_sizes.ggml(size, quantization if isinstance(quantization, str) else None)


class WhisperCppAdapter(WhisperAdapter[WhisperCppConfig], ServerAdapter[WhisperCppConfig]):
    """One process of ours and one of whisper.cpp for each model."""

    name = "whisper_cpp"
    summary = "Speech recognition: Whisper models on whisper.cpp's own server."
    requirements = Path(__file__).parent / "requirements.lock"
    config = WhisperCppConfig
    overridable_keys = ("threads", "beam_size", "default_language", "max_audio_s")
    program = "runtimes.whisper_cpp.worker"
    places = (PROGRAM,)
    missing = (
        f"binary: {PROGRAM} is not on PATH; build it from whisper.cpp's source (cmake -B build && cmake --build build --target "
        f"{PROGRAM}) and set binary to where it is"
    )

    def problems(self, config: WhisperCppConfig) -> Iterator[str]:
        """Problems: a file that is no such model, no program, an unknown language, options that only llmux sets."""
        try:
            read(config.path)
        except ModelUnusableError as error:
            yield f"path: {error}"
        yield from self.program_problems(config)
        if config.vad_model is not None and not config.vad_model.is_file():
            yield f"vad_model: {config.vad_model}: there is no such file"
        yield from speech_recognition.problems(config.default_language)
        yield from option_problems(config)

    def options(self, config: WhisperCppConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """The worker's own settings. Raises ModelUnusableError without a program or a model."""
        multilingual = read(config.path).multilingual
        values: dict[str, JsonValue] = {
            "model": str(config.path),
            "language": "auto" if multilingual else "en",
            "threads": config.threads,
            "beam_size": config.beam_size,
            "vad": config.vad_model is not None,
            "vad_model": None if config.vad_model is None else str(config.vad_model),
            "no_gpu": not context.device.kind.accelerates,
        }
        return {
            "argv": [*self.command(self.find_program(config), config, values)],
            "multilingual": multilingual,
            **speech_recognition.options(config.default_language, config.max_audio_s),
        }

    def launch(self, config: WhisperCppConfig, context: LaunchContext) -> LaunchSpec:
        """How to start our worker. Raises RuntimeNotInstalledError or ModelUnusableError."""
        return replace(super().launch(config, context), library_path=tuple(map(str, config.library_path)))

    def estimate(self, config: WhisperCppConfig) -> Estimate | None:
        """The stored weights, and caches and buffers by the file's header; None: the header can't be read."""
        try:
            header = read(config.path)
        except ModelUnusableError:
            return None
        return Estimate.of(
            {"weights": config.path.stat().st_size, "work": header.work(config.beam_size), "program": PROGRAM_MIB * MIB}
        )

    def weights(self, config: WhisperCppConfig) -> tuple[Path, ...]:
        """The one model file."""
        return (config.path,)


@dataclass(frozen=True, slots=True)
class Header:
    """The sizes at the beginning of a model's file."""

    vocabulary: int
    frames: int
    width: int
    positions: int
    text_width: int
    text_layers: int

    @property
    def multilingual(self) -> bool:
        """Does the model know more languages than English?"""
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
    """Read the header. Blocks on a few bytes. Raises ModelUnusableError with the reason."""
    try:
        with open_regular(path) as file:
            magic, *sizes = struct.unpack(HEADER, file.read(struct.calcsize(HEADER)))
    except FileNotFoundError as error:
        raise ModelUnusableError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ModelUnusableError(f"{path} can't be read: {error.strerror}") from error
    except struct.error as error:
        raise ModelUnusableError(f"{path} is cut off, or not a model of whisper.cpp") from error
    if magic != MAGIC:
        raise ModelUnusableError(f"{path} is not a model of whisper.cpp (ggml-NAME.bin)")
    return Header(*sizes)
