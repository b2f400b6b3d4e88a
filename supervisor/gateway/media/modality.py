"""Refuses media that a model can't take, in every API's shape, before the model is loaded for them.

A part of a prompt says what it is by its `type`, wherever it lies: in a message, in a tool's result, in a document.
`media` collects these words on its way through the prompt; in most prompts, which are text only, there are none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from runtimes.model_config import Modality
from supervisor.errors import InvalidRequestError

_MEDIA: Final[Mapping[str, tuple[str, Modality | None]]] = {
    **dict.fromkeys(("image_url", "input_image", "image"), ("images", "image")),
    **dict.fromkeys(("video_url", "input_video", "video"), ("video", "image")),  # what sees no images sees no video
    **dict.fromkeys(("audio_url", "input_audio", "audio"), ("audio", "audio")),
    **dict.fromkeys(("document", "file", "input_file"), ("documents", None)),  # no runtime opens them
}


def refuse_media(types: Collection[str], name: str, inputs: frozenset[Modality] | None, param: str) -> None:
    """Raises InvalidRequestError where parts of these `types` are nothing that `name` can take. `inputs` None: unknown."""
    if inputs is None:
        return
    for kind in types:
        word, modality = _MEDIA.get(kind, ("", "text"))
        if word and modality not in inputs:
            takes = ", ".join(sorted(inputs))
            raise InvalidRequestError(f"{name} takes {takes}, no {word}.", code="modality_unsupported", param=param)
