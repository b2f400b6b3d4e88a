"""Messages to tokens: validate them, bring them into the form that chat templates expect, render, and add images."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2.exceptions import TemplateError

from runtimes.sdk.chat.formats.tagged import THINK
from runtimes.sdk.chat.messages import read, take_effort
from runtimes.sdk.chat.worker import Prompt as TextPrompt
from runtimes.sdk.errors import WorkerError, unsupported
from runtimes.transformers.worker.chat.guide import Guide
from runtimes.transformers.worker.chat.model import Loaded
from runtimes.transformers.worker.chat.pictures import MAX_PIXELS, picture, prepared


@dataclass(frozen=True, slots=True)
class Prompt(TextPrompt):
    """`pictures`: model inputs beside the tokens. `guide`: constrains the answer."""

    pictures: Mapping[str, Any] | None = None
    guide: Guide | None = None


def chat(
    loaded: Loaded, messages: object, tools: Sequence[Mapping[str, object]], arguments: Mapping[str, object]
) -> Prompt:
    """The prompt for a conversation. `arguments` go to the chat template. Raises WorkerError."""
    if loaded.tokenizer.chat_template is None:
        raise WorkerError("This model has no chat template; use /v1/completions.", code="unsupported_endpoint")
    images: list[Any] = []

    def take(url: object) -> None:
        images.append(picture(url, MAX_PIXELS - sum(image.width * image.height for image in images)))

    turns = read(loaded, messages, take)
    extra = dict(arguments)
    if loaded.format == "harmony":
        take_effort(turns, extra)
    own = inspect.signature(loaded.tokenizer.apply_chat_template).parameters
    for name in extra:
        if name in own or name not in str(loaded.tokenizer.chat_template):
            raise unsupported("chat_template_kwargs", f"this model's chat template has no argument {name!r}")
    try:
        text = loaded.tokenizer.apply_chat_template(
            turns, tools=list(tools) or None, add_generation_prompt=True, tokenize=False, **extra
        )
        text.encode()
    except UnicodeEncodeError as error:
        raise WorkerError("messages: there is half a character in them, a lone surrogate.", param="messages") from error
    except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise WorkerError(f"The model's chat template refuses these messages: {error}", param="messages") from error
    thinking = loaded.format == "tagged" and text.rstrip().endswith(THINK)
    tokens = loaded.encode(text)
    if not images:
        return Prompt(tokens, thinking)
    features, counts = prepared(loaded.image_processor, images)
    return Prompt(*_with_pictures(loaded, tokens, features, counts, thinking))


def _with_pictures(
    loaded: Loaded, tokens: list[int], features: dict[str, Any], counts: list[int], thinking: bool
) -> tuple[list[int], bool, Mapping[str, Any]]:
    """The tokens with each image's placeholder repeated for each of the image's tokens."""
    place = loaded.model.config.image_token_id
    if tokens.count(place) != len(counts):
        message = "messages: the text has marks of pictures in it, or the chat template leaves pictures out."
        raise WorkerError(message, param="messages")
    left = iter(counts)
    long: list[int] = []
    for token in tokens:
        long += [token] * next(left) if token == place else [token]
    device = loaded.model.device
    given = {
        name: value.to(device, loaded.model.dtype) if value.is_floating_point() else value.to(device)
        for name, value in features.items()
    }
    given["mm_token_type_ids"] = torch.tensor([[int(token == place) for token in long]], device=device)
    return long, thinking, given
