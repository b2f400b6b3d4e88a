"""How the workers treat each parameter of OpenAI's transcriptions and translations: used, ignored or refused."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from runtimes.sdk.parameters import Table, refused, used

PARAMETERS: Final[Table] = MappingProxyType(
    {
        "file": used("the audio, or a video; a part with a filename"),
        "model": used("chooses the model; the supervisor has done so"),
        "language": used("a code (en, en-US) or an English name; without it `default_language`, else what is heard"),
        "prompt": used("words that are likely, or what was said before"),
        "temperature": used("0 to 1; at 0 Whisper raises it by itself where it gets stuck"),
        "response_format": used("json (default), text, srt, verbose_json, vtt"),
        "timestamp_granularities": used("segment, word; words with verbose_json only"),
        "stream": used("events, one for each segment; with json and text"),
        "include": refused("probabilities of tokens are not told.", []),
        "chunking_strategy": refused("how long audio is cut can't be chosen.", "auto"),
        "known_speaker_names": refused("speakers are not told apart.", []),
        "known_speaker_references": refused("speakers are not told apart.", []),
    }
)
"""The table for models that support every parameter."""

COHERE: Final[Table] = MappingProxyType(
    {
        **PARAMETERS,
        "prompt": refused("this model takes none."),
        "timestamp_granularities": refused("this model tells times of segments only.", ["segment"]),
    }
)
"""The table for CohereAsr."""
