"""A language from a tokenizer of the transformers library, and the prompts that its chat template renders.

The caller provides the tokenizer: this module imports nothing from that library.
"""

from __future__ import annotations

import abc
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from jinja2.exceptions import TemplateError

from runtimes.sdk.chat.language import Format, format_of, markers_of
from runtimes.sdk.chat.messages import TakePicture, read_messages, take_effort
from runtimes.sdk.chat.template import ends_thinking, no_template
from runtimes.sdk.errors import WorkerError, unsupported

_FORMATS: Final[Mapping[str, Format]] = {"qwen": "tagged", "harmony": "harmony", "none": "none"}


@dataclass(frozen=True, slots=True)
class TokenizerLanguage(abc.ABC):
    """A language with the facts of its tokenizer. `xml_calls`: the model writes calls as tags rather than JSON."""

    tokenizer: Any
    format: Format
    xml_calls: bool
    knows_tools: bool
    ends: frozenset[int]
    hidden: frozenset[int]  # special tokens that belong to no text

    @property
    @abc.abstractmethod
    def takes_images(self) -> bool:
        """May messages contain pictures?"""

    @property
    @abc.abstractmethod
    def vocabulary(self) -> int:
        """Token ids are below this."""

    @property
    @abc.abstractmethod
    def defaults(self) -> Mapping[str, float]:
        """The model's own sampling defaults."""

    @property
    def template(self) -> str:
        """The chat template; empty: there is none."""
        return _template_text(self.tokenizer) if self.tokenizer.chat_template is not None else ""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens, special tokens included."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without added special tokens."""
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def encode_prompt(self, text: str) -> list[int]:
        """A text's tokens, with the special tokens that the tokenizer adds."""
        tokens: list[int] = self.tokenizer.encode(text)
        return tokens

    def single_token(self, text: str) -> int | None:
        """The single token of this text; None if the text has several tokens."""
        tokens = self.encode(text)
        return tokens[0] if len(tokens) == 1 else None


class Facts(TypedDict):
    """The fields of a TokenizerLanguage."""

    tokenizer: Any
    format: Format
    xml_calls: bool
    knows_tools: bool
    ends: frozenset[int]
    hidden: frozenset[int]


def facts(tokenizer: Any, ends: Iterable[int | None], *, tool_format: str = "auto") -> Facts:
    """The facts of a tokenizer and its chat template. `ends`: the model's tokens that end an answer.

    `tool_format`: how the model writes calls and reasoning, `qwen`, `harmony` or `none`; `auto`: detected from the template.
    """
    template = _template_text(tokenizer)
    wanted = _FORMATS.get(tool_format, format_of(template))
    markers = markers_of(wanted)
    vocabulary = tokenizer.get_added_vocab()
    found = {*ends, tokenizer.eos_token_id, *(vocabulary.get(name) for name in ("<|return|>", "<|call|>"))}
    added = tokenizer.added_tokens_decoder
    return Facts(
        tokenizer=tokenizer,
        format=wanted,
        xml_calls="<function=" in template,
        knows_tools=wanted != "none" and "tools" in template,
        ends=frozenset(token for token in found if token is not None),
        hidden=frozenset(i for i, token in added.items() if token.special and token.content not in markers),
    )


def render_prompt(
    language: TokenizerLanguage,
    messages: object,
    tools: Sequence[Mapping[str, object]],
    arguments: Mapping[str, object],
    take: TakePicture | None = None,
) -> tuple[str, bool]:
    """The prompt of a conversation as text, and whether it ends within reasoning. `arguments` go to the chat template.

    `take` is called for each picture: see `messages.read_messages`. Raises WorkerError.
    """
    if language.tokenizer.chat_template is None:
        raise no_template()
    turns = read_messages(language, messages, take)
    extra = dict(arguments)
    if language.format == "harmony":
        take_effort(turns, extra)
    own = inspect.signature(language.tokenizer.apply_chat_template).parameters
    for name in extra:
        if name in own or name not in str(language.tokenizer.chat_template):
            raise unsupported("chat_template_kwargs", f"this model's chat template has no argument {name!r}")
    try:
        text: str = language.tokenizer.apply_chat_template(
            turns, tools=list(tools) or None, add_generation_prompt=True, tokenize=False, **extra
        )
        text.encode()
    except UnicodeEncodeError as error:
        raise WorkerError("messages: there is half a character in them, a lone surrogate.", param="messages") from error
    except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise WorkerError(f"The model's chat template refuses these messages: {error}", param="messages") from error
    return text, ends_thinking(language, text)


def _template_text(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template or "")
