"""How the worker treats each parameter of a speech request: used, ignored or refused."""

from __future__ import annotations

from typing import Final

from runtimes.sdk.parameters import Parameter, Table, refused, used

_ALL: Final[Table] = {
    "model": used("Chooses the model; the supervisor has done so."),
    "input": used("The text, at most 100 000 characters. It is split at sentences and spoken one after the other."),
    "voice": used(
        "The name of a reference clip in the folder `voices`, or an object with it as id. Default: `default_voice`."
    ),
    "response_format": used("mp3 (default), opus, aac, flac, wav, or pcm: 16 bit, 24 kHz, mono, little-endian."),
    "stream_format": used(
        "audio: the file as it is made. sse: events with base64 pieces of it, at the end the tokens."
    ),
    "speed": used("0.25 to 4, at the same pitch."),
    "language": used("Multilingual: one of its 23 languages, such as de. Default: `default_language`."),
    "temperature": used("0.05 to 5."),
    "repetition_penalty": used("1 to 3."),
    "top_p": used("0 to 1."),
    "seed": used("The same seed gives the same speech of the same text."),
    "instructions": refused("Chatterbox can't be told how to speak; choose a voice, and exaggeration", ""),
}
_EMOTION: Final[Table] = {
    "exaggeration": used("0.25 to 2: how lively."),
    "cfg_weight": used("0 to 1: how much it keeps to the voice's pace."),
    "min_p": used("0 to 1."),
    "top_k": refused("only the turbo variant samples from the k likeliest"),
    "norm_loudness": refused("only the turbo variant does that"),
}
_TURBO: Final[Table] = {
    "top_k": used("Only the k likeliest, from 1."),
    "norm_loudness": used("false: keep the reference clip's loudness."),
    **{
        name: refused("the turbo variant has no such control", 0, 0.0)
        for name in ("exaggeration", "cfg_weight", "min_p")
    },
}
_ENGLISH: Final[dict[str, Parameter]] = {"language": refused("this variant speaks English only", "en", "")}

SPEECH: Final[dict[str, Table]] = {
    "default": {**_ALL, **_EMOTION, **_ENGLISH},
    "multilingual": {**_ALL, **_EMOTION},
    "turbo": {**_ALL, **_TURBO, **_ENGLISH},
}
"""By variant."""
