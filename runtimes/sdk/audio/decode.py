"""Decodes a client's audio file to samples for speech models: 16 kHz, mono, float32.

PyAV includes FFmpeg, so no program is needed. FFmpeg chooses the demuxer by the file's content; those that open other files
or URLs (playlists) are disabled, or a client could read files of this machine. Of a damaged file, whatever can be decoded
is used, as players do; a file without a single sample is refused.
"""

from __future__ import annotations

from typing import BinaryIO, Final

import av
import numpy as np

from runtimes.sdk.audio.samples import RATE, Samples
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.worker_pool import Cancel

_DEMUXERS: Final = "aac,ac3,aiff,amr,amrnb,amrwb,ape,asf,au,avi,caf,eac3,flac,flv,matroska,mov,mp3,mpeg,mpegts,mpegvideo,ogg,tta,voc,w64,wav,wv"
_RATES: Final = range(2_000, 768_001)
_BAD_PACKETS: Final = 1000


def decode(file: BinaryIO, *, longest_s: float, cancel: Cancel) -> Samples:
    """The samples of the file's first audio track, within [-1, 1] unless the file itself exceeds that.

    Blocks, about a second for an hour of audio. Raises WorkerError `invalid_audio` and `audio_too_long`, and
    CancelledWorkError.
    """
    if not file.read(1):
        raise _audio_error("The file is empty.")
    file.seek(0)
    pcm = bytearray()  # grows in place: an hour is 230 MB, which must not exist twice
    try:
        with av.open(
            file, "r", metadata_errors="ignore", options={"format_whitelist": _DEMUXERS, "protocol_whitelist": "none"}
        ) as container:
            _decode_track(container, pcm, int(longest_s * RATE) * 4, longest_s, cancel)
    except (av.error.FFmpegError, ValueError, OverflowError, UnicodeError) as error:
        if not pcm:
            raise _audio_error("The file can't be read as audio or video: it is damaged, or no sound file.") from error
    if not pcm:
        raise _audio_error("The file holds no sound: not one sample could be decoded.")
    samples = np.frombuffer(pcm, np.float32)
    if not np.isfinite(samples).all():
        np.nan_to_num(samples, copy=False, posinf=0.0, neginf=0.0)
    return samples


def _decode_track(
    container: av.container.InputContainer, pcm: bytearray, most_bytes: int, longest_s: float, cancel: Cancel
) -> None:
    if not container.streams.audio:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise _audio_error(f"The file has no audio track; it has: {kinds}.")
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
            if (
                frame.format.name,
                frame.layout.name,
                frame.sample_rate,
            ) != shape:  # the format may change within a file
                if resampler is not None:
                    _append_frames(pcm, resampler.resample(None))
                if frame.sample_rate not in _RATES:
                    raise _audio_error(f"The sample rate of {frame.sample_rate} Hz is out of range.")
                shape = (frame.format.name, frame.layout.name, frame.sample_rate)
                resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
            assert resampler is not None
            frame.pts = None  # ignore gaps and jumps in the timestamps
            _append_frames(pcm, resampler.resample(frame))
            if len(pcm) > most_bytes:
                raise WorkerError(
                    f"The audio is longer than {longest_s:g} s, the most this model takes (max_audio_s). Send it in parts.",
                    code="audio_too_long",
                    param="file",
                )
    if resampler is not None:
        _append_frames(pcm, resampler.resample(None))


def _append_frames(pcm: bytearray, frames: list[av.AudioFrame]) -> None:
    for frame in frames:
        pcm += frame.to_ndarray().tobytes()


def _audio_error(message: str) -> WorkerError:
    takes = "Send flac, mp3, mp4, mpeg, mpga, m4a, ogg, wav or webm."
    return WorkerError(f"{message} {takes}", code="invalid_audio", param="file")
