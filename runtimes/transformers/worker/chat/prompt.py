"""Turns messages into tokens: the chat template renders them, and images get places among the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from runtimes.sdk.chat.pictures import taker, unusable_picture
from runtimes.sdk.chat.tokenizer import render_prompt
from runtimes.sdk.chat.worker import Prompt as TextPrompt
from runtimes.sdk.errors import WorkerError
from runtimes.transformers.worker.chat.guide import Guide
from runtimes.transformers.worker.chat.model import Loaded


@dataclass(frozen=True, slots=True)
class Prompt(TextPrompt):
    """A rendered prompt. `pictures`: model inputs beside the tokens. `guide`: constrains the answer."""

    pictures: Mapping[str, Any] | None = None
    guide: Guide | None = None


def chat(
    loaded: Loaded, messages: object, tools: Sequence[Mapping[str, object]], arguments: Mapping[str, object]
) -> Prompt:
    """The prompt for a conversation. `arguments` go to the chat template. Raises WorkerError."""
    images: list[Image.Image] = []
    text, thinking = render_prompt(loaded, messages, tools, arguments, taker(images))
    tokens = loaded.encode(text)
    if not images:
        return Prompt(tokens, thinking)
    features, counts = prepared(loaded.image_processor, images)
    return Prompt(*_with_pictures(loaded, tokens, features, counts, thinking))


def prepared(processor: Any, pictures: list[Image.Image]) -> tuple[dict[str, Any], list[int]]:
    """The model's inputs for these images, and the number of tokens of each image. Raises WorkerError."""
    try:
        features = dict(processor(pictures, return_tensors="pt"))
    except ValueError as error:  # unsupported shapes
        raise unusable_picture(f"the picture can't be used: {error}") from error
    return features, [int(grid.prod()) // processor.merge_size**2 for grid in features["image_grid_thw"]]


def _with_pictures(
    loaded: Loaded, tokens: list[int], features: dict[str, Any], counts: list[int], thinking: bool
) -> tuple[list[int], bool, Mapping[str, Any]]:
    """The tokens, with each image's placeholder repeated once for each token of the image."""
    place = loaded.model.config.image_token_id
    if tokens.count(place) != len(counts):
        message = "messages: the text has marks of pictures in it, or the chat template leaves pictures out."
        raise WorkerError(message, param="messages")
    counts_left = iter(counts)
    expanded: list[int] = []
    for token in tokens:
        expanded += [token] * next(counts_left) if token == place else [token]
    device = loaded.model.device
    given = {
        name: value.to(device, loaded.model.dtype) if value.is_floating_point() else value.to(device)
        for name, value in features.items()
    }
    given["mm_token_type_ids"] = torch.tensor([[int(token == place) for token in expanded]], device=device)
    return expanded, thinking, given
