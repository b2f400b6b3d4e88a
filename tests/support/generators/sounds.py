"""Writes sound files of every kind that clients send, and some that are none. Run by a Python that has PyAV:

sounds.py FOLDER '{"speech": "….wav"}'
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import av
import numpy as np

FORMATS = {
    "speech.wav": ("wav", "pcm_s16le", None),
    "float.wav": ("wav", "pcm_f32le", None),
    "speech.flac": ("flac", "flac", None),
    "speech.mp3": ("mp3", "libmp3lame", None),
    "speech.mpga": ("mp2", "mp2", None),
    "speech.mpeg": ("mpeg", "mp2", "mpeg1video"),
    "speech.mp4": ("mp4", "aac", "mpeg4"),
    "speech.m4a": ("ipod", "aac", None),
    "vorbis.ogg": ("ogg", "vorbis", None),
    "opus.ogg": ("ogg", "libopus", None),
    "speech.webm": ("webm", "libopus", None),
    "video.webm": ("webm", "libopus", "libvpx"),
}


def samples_of(path: Path) -> tuple[np.ndarray, int]:
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
        rate = container.streams.audio[0].rate
    sound = np.concatenate(frames, axis=1)[0]
    return sound.astype(np.float32) / (32768 if sound.dtype == np.int16 else 1), rate


def encode(
    sound: np.ndarray | None,
    rate: int,
    container: str,
    codec: str = "",
    video: str | None = None,
    *,
    stereo: bool = False,
) -> bytes:
    """A file of that kind. `sound` None: pictures alone."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as out:
        pictures = None
        if video is not None:
            pictures = out.add_stream(video, rate=25)
            pictures.width = pictures.height = 64
            pictures.pix_fmt = "yuv420p"
        if sound is not None:
            rate_out = 48000 if codec == "libopus" else rate
            both = stereo or codec == "vorbis"  # FFmpeg's own Vorbis, which knows nothing else
            options = {"strict": "experimental"} if codec == "vorbis" else {}
            track = out.add_stream(codec, rate=rate_out, options=options, layout="stereo" if both else "mono")
            resampler = av.AudioResampler(
                format=track.codec_context.format,
                layout=track.codec_context.layout,
                rate=rate_out,
                frame_size=track.codec_context.frame_size or None,
            )
            frame = av.AudioFrame.from_ndarray(
                np.ascontiguousarray(sound[None], np.float32), format="flt", layout="mono"
            )
            frame.sample_rate = rate
            for piece in resampler.resample(frame) + resampler.resample(None):
                out.mux(track.encode(piece))
            out.mux(track.encode(None))
        if pictures is not None:
            for shade in range(10):
                picture = np.full((64, 64, 3), 20 * shade, np.uint8)
                out.mux(pictures.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            out.mux(pictures.encode(None))
    return buffer.getvalue()


def main() -> None:
    folder, speech = Path(sys.argv[1]), Path(json.loads(sys.argv[2])["speech"])
    folder.mkdir()
    sound, rate = samples_of(speech)
    files = {name: encode(sound, rate, *kind) for name, kind in FORMATS.items()}
    files["stereo.wav"] = encode(sound, rate, "wav", "pcm_s16le", stereo=True)
    files["silent.wav"] = encode(np.zeros(3 * 16000), 16000, "wav", "pcm_s16le")
    files["silent.mp3"] = encode(np.zeros(3 * 16000), 16000, "mp3", "libmp3lame")
    files["tone.flac"] = encode(0.3 * np.sin(2 * np.pi * 1000 * np.arange(2 * 44100) / 44100), 44100, "flac", "flac")
    for name, kind in FORMATS.items():
        tone = 0.3 * np.sin(2 * np.pi * 1000 * np.arange(2 * 44100) / 44100)
        files[f"tone-{name}"] = encode(tone, 44100, *kind)
    long = np.tile(np.concatenate([sound, np.zeros(rate)]), 12)
    files["long.ogg"] = encode(long, rate, "ogg", "libopus")
    files["pictures.mp4"] = encode(None, 0, "mp4", video="mpeg4")
    files["no-samples.wav"] = files["speech.wav"][:44]
    files["one-sample.wav"] = encode(np.full(1, 0.5), 16000, "wav", "pcm_s16le")
    files["not-a-number.wav"] = encode(np.full(16000, np.nan), 16000, "wav", "pcm_f32le")
    files["empty.wav"] = b""
    files["text.mp3"] = b"This is no sound at all.\n" * 40
    files["noise.mp3"] = np.random.default_rng(1).bytes(20_000)
    files["picture.png"] = _picture()
    files["list.m3u8"] = (
        b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n" + f"file://{speech}\n".encode() + b"#EXT-X-ENDLIST\n"
    )
    files["list.ffconcat"] = b"ffconcat version 1.0\nfile '" + str(speech).encode() + b"'\n"
    for name in ("speech.wav", "speech.mp3", "opus.ogg", "speech.flac"):
        files[f"half-{name}"] = files[name][: len(files[name]) // 2]
    files["half-speech.m4a"] = files["speech.m4a"][: len(files["speech.m4a"]) // 2]  # its index is at the end
    files["torn.mp3"] = files["speech.mp3"][:3000] + bytes(2000) + files["speech.mp3"][5000:]
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _picture() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="image2pipe") as out:
        track = out.add_stream("png", rate=1)
        track.width = track.height = 32
        track.pix_fmt = "rgb24"
        out.mux(track.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        out.mux(track.encode(None))
    return buffer.getvalue()


if __name__ == "__main__":
    main()
