"""What the shared parts of a worker know of a loaded model. Each runtime has its own class for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from runtimes.sdk.chat.formats.harmony import MARKERS

Format = Literal["tagged", "harmony", "template", "none"]
"""How a model writes reasoning and tool calls: see `formats`; `template`: as a response template says, which its runtime reads."""

DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The values of a generation_config.json that are defaults of requests."""

_TAGS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def format_of(template: str) -> Format:
    """The format that a chat template shows."""
    if "<|channel|>" in template:
        return "harmony"
    return "tagged" if "<tool_call>" in template or "</think>" in template else "none"


def markers_of(form: Format) -> frozenset[str]:
    """The special tokens that the format's parser reads; all others belong to no text."""
    return frozenset({"harmony": MARKERS, "tagged": _TAGS}.get(form, ()))


def defaults_of(generation: Mapping[str, Any], names: Sequence[str] = DEFAULTS) -> dict[str, float]:
    """Those of a generation_config.json, if it samples: otherwise its numbers are not meant for sampling."""
    if not generation.get("do_sample"):
        return {}
    return {name: value for name in names if (value := generation.get(name)) is not None}


class Language(Protocol):
    """A model's vocabulary, and what its prompts and answers look like."""

    @property
    def format(self) -> Format:
        """How it writes reasoning and calls."""

    @property
    def knows_tools(self) -> bool:
        """Whether its chat template shows tools, and its calls can be read."""

    @property
    def takes_images(self) -> bool:
        """Whether messages may have pictures."""

    @property
    def template(self) -> str:
        """Its chat template; empty if it has none."""

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
        """The model's own values of temperature, top_p, top_k, min_p and repetition_penalty, where it has any."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, special tokens included."""

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a text to continue, with those that the model wants at its beginning."""
