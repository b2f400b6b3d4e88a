"""Any sound file of a client → samples as speech models take them: 16 kHz, mono, float32.

PyAV brings FFmpeg along, so no program is needed. The file decides which of FFmpeg's readers is used; those that
open further files or addresses (playlists) are left out, or a client could have this machine read what only it can.
A damaged file gives what can be decoded of it, as players do; without a single sample it is refused.
"""

from __future__ import annotations

from typing import BinaryIO, Final

import av
import numpy as np

from runtimes.sdk.audio.samples import RATE, Samples
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.worker_pool import Cancel

_READERS: Final = "aac,ac3,aiff,amr,amrnb,amrwb,ape,asf,au,avi,caf,eac3,flac,flv,matroska,mov,mp3,mpeg,mpegts,mpegvideo,ogg,tta,voc,w64,wav,wv"
_RATES: Final = range(2_000, 768_001)
_BAD_PACKETS: Final = 1000


def decode(file: BinaryIO, *, longest_s: float, cancel: Cancel) -> Samples:
    """The samples of the file's first audio track, within [-1, 1] unless the file itself goes beyond.

    Blocks, about a second for an hour of sound. Raises WorkerError `invalid_audio` for what is no sound, and
    `audio_too_long`; CancelledWorkError.
    """
    if not file.read(1):
        raise _invalid("The file is empty.")
    file.seek(0)
    pcm = bytearray()  # grows in place: an hour is 230 MB, which must not be there twice
    try:
        with av.open(
            file, "r", metadata_errors="ignore", options={"format_whitelist": _READERS, "protocol_whitelist": "none"}
        ) as container:
            _read(container, pcm, int(longest_s * RATE) * 4, longest_s, cancel)
    except (av.error.FFmpegError, ValueError, OverflowError, UnicodeError) as error:
        if not pcm:
            raise _invalid("The file can't be read as audio or video: it is damaged, or no sound file.") from error
    if not pcm:
        raise _invalid("The file holds no sound: not one sample could be decoded.")
    samples = np.frombuffer(pcm, np.float32)
    if not np.isfinite(samples).all():
        np.nan_to_num(samples, copy=False, posinf=0.0, neginf=0.0)
    return samples


def _read(
    container: av.container.InputContainer, pcm: bytearray, most_bytes: int, longest_s: float, cancel: Cancel
) -> None:
    if not container.streams.audio:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise _invalid(f"The file has no audio track; it has: {kinds}.")
    track = container.streams.audio[0]
    resampler, shape = None, None
    bad = 0
    for packet in container.demux(track):
        cancel.check()
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            bad += 1
            if bad > _BAD_PACKETS:
                raise
            continue
        for frame in frames:
            assert isinstance(frame, av.AudioFrame)
            if (frame.format.name, frame.layout.name, frame.sample_rate) != shape:  # files may change on the way
                if resampler is not None:
                    _append(pcm, resampler.resample(None))
                if frame.sample_rate not in _RATES:
                    raise _invalid(f"The sample rate of {frame.sample_rate} Hz is out of range.")
                shape = (frame.format.name, frame.layout.name, frame.sample_rate)
                resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
            assert resampler is not None
            frame.pts = None  # gaps and jumps of a stream's clock are not sound
            _append(pcm, resampler.resample(frame))
            if len(pcm) > most_bytes:
                raise WorkerError(
                    f"The audio is longer than {longest_s:g} s, the most this model takes (max_audio_s). Send it in parts.",
                    code="audio_too_long",
                    param="file",
                )
    if resampler is not None:
        _append(pcm, resampler.resample(None))


def _append(pcm: bytearray, frames: list[av.AudioFrame]) -> None:
    for frame in frames:
        pcm += frame.to_ndarray().tobytes()


def _invalid(message: str) -> WorkerError:
    takes = "Send flac, mp3, mp4, mpeg, mpga, m4a, ogg, wav or webm."
    return WorkerError(f"{message} {takes}", code="invalid_audio", param="file")
