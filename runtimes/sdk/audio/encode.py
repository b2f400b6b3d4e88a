"""Streaming audio encoders: samples in, bytes of a file out, piece by piece.

The formats are those of OpenAI's `/v1/audio/speech`. The header of a streamed WAV says that its length is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import av
import numpy as np

Samples = Any  # numpy float32, mono, -1 … 1


@dataclass(frozen=True, slots=True)
class Format:
    """How a format is encoded. `codec` None: raw 16-bit samples, little-endian."""

    media_type: str
    container: str = ""
    codec: str | None = None
    bit_rate: int | None = None


FORMATS: Final = MappingProxyType(
    {
        "mp3": Format("audio/mpeg", "mp3", "libmp3lame", 96_000),
        "opus": Format("audio/ogg", "ogg", "libopus", 48_000),
        "aac": Format("audio/aac", "adts", "aac", 96_000),
        "flac": Format("audio/flac", "flac", "flac"),
        "wav": Format("audio/wav", "wav", "pcm_s16le"),
        "pcm": Format("audio/pcm"),
    }
)


class _Sink:
    """A write-only file. `take` removes its content, piece by piece."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        data = bytes(self._data)
        self._data.clear()
        return data


class Encoder:
    """Encodes one mono file. `rate` is the sample rate of input and file."""

    def __init__(self, name: str, rate: int) -> None:
        self._format, self._rate, self._written = FORMATS[name], rate, 0
        self._sink = _Sink()
        if self._format.codec is None:
            return
        self._file: Any = av.open(self._sink, "w", format=self._format.container)
        self._stream: Any = self._file.add_stream(self._format.codec, rate=rate)
        self._stream.layout = "mono"
        if self._format.bit_rate:
            self._stream.bit_rate = self._format.bit_rate

    def feed(self, samples: Samples) -> bytes:
        """Encode these samples. Returns the bytes that are ready, perhaps none."""
        pcm = (np.clip(samples, -1, 1) * 32767).astype("<i2")
        if self._format.codec is None:
            return bytes(pcm.tobytes())
        frame = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._written
        self._written += len(pcm)
        self._file.mux(self._stream.encode(frame))  # in the codec's own sample format and frame size
        return self._sink.take()

    def end(self) -> bytes:
        """Finish the file. Returns its remaining bytes."""
        if self._format.codec is None:
            return b""
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return self._sink.take()


class Tempo:
    """Changes the speed and keeps the pitch. `speed` 0.25 … 4."""

    def __init__(self, speed: float, rate: int) -> None:
        self._rate, self._read = rate, 0
        graph: Any = av.filter.Graph()
        source = graph.add_abuffer(format="flt", sample_rate=rate, layout="mono")
        last = source
        for factor in _tempo_factors(speed):
            step = graph.add("atempo", f"{factor:.6f}")
            last.link_to(step)
            last = step
        sink = graph.add("abuffersink")
        last.link_to(sink)
        graph.configure()
        self._graph = graph

    def feed(self, samples: Samples) -> Samples:
        """Convert these samples. Returns the samples that are ready."""
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples, "<f4")[None], format="flt", layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._read
        self._read += len(samples)
        self._graph.push(frame)
        return self._filtered_samples()

    def end(self) -> Samples:
        """Finish. Returns the remaining samples."""
        self._graph.push(None)
        return self._filtered_samples()

    def _filtered_samples(self) -> Samples:
        return np.concatenate([np.zeros(0, "<f4"), *self._pull_frames()])

    def _pull_frames(self) -> Iterator[Samples]:
        while True:
            try:
                yield self._graph.pull().to_ndarray()[0]
            except (av.BlockingIOError, av.EOFError):
                return


def _tempo_factors(speed: float) -> Iterator[float]:
    """Factors with the product `speed`: FFmpeg's filter goes down to 0.5 only, and skips samples above 2."""
    while speed < 0.5:
        yield 0.5
        speed /= 0.5
    while speed > 2:
        yield 2
        speed /= 2
    yield speed
