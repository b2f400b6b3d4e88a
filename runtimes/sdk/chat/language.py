"""The facts about a loaded model that the shared parts of a worker need. Each runtime has its own class for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from runtimes.sdk.chat.formats.harmony import MARKERS

Format = Literal["tagged", "harmony", "template", "none"]
"""How a model writes reasoning and tool calls: see `formats`. `template`: a response template describes it to the runtime."""

DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The names of values in generation_config.json that serve as defaults of requests."""

_TAGS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def format_of(template: str) -> Format:
    """The format that a chat template uses."""
    if "<|channel|>" in template:
        return "harmony"
    return "tagged" if "<tool_call>" in template or "</think>" in template else "none"


def markers_of(form: Format) -> frozenset[str]:
    """The special tokens that the format's parser reads; all others belong to no text."""
    return frozenset({"harmony": MARKERS, "tagged": _TAGS}.get(form, ()))


def defaults_of(generation: Mapping[str, Any], names: Sequence[str] = DEFAULTS) -> dict[str, float]:
    """The defaults in a generation_config.json, if it turns sampling on; otherwise its numbers aren't meant for sampling."""
    if not generation.get("do_sample"):
        return {}
    return {name: value for name in names if (value := generation.get(name)) is not None}


class Language(Protocol):
    """A model's vocabulary, and the form of its prompts and answers."""

    @property
    def format(self) -> Format:
        """How the model writes reasoning and calls."""

    @property
    def knows_tools(self) -> bool:
        """Does the chat template render tools, and can the model's calls be parsed?"""

    @property
    def takes_images(self) -> bool:
        """May messages contain pictures?"""

    @property
    def template(self) -> str:
        """The chat template; empty: there is none."""

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def hidden(self) -> frozenset[int]:
        """Special tokens that belong to no text."""

    @property
    def defaults(self) -> Mapping[str, float]:
        """The model's own values of temperature, top_p, top_k, min_p and repetition_penalty, if it has any."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens, special tokens included."""

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a text to continue, with the tokens that the model expects at the beginning."""
