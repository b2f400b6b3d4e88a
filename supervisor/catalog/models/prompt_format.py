"""Prompt formats: whether the worker or llmux writes a model's prompts, and the limits of conversations in these formats.

Most models have a chat template, and their worker writes the prompts. A model with a `prompt_format` may have no template, or
a wrong one: then llmux writes the prompts (`supervisor.gateway.prompts`), and the worker only completes texts. A worker's own
template of the same family is better, since it supports tools and pictures. It is recognised by a word that only templates of
that family have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from runtimes.base import CHAT_TEMPLATE, Capabilities, Endpoint, Thinking
from runtimes.model_config import PromptFormatName

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """A format. The fields about requests apply if llmux writes the prompts."""

    name: PromptFormatName
    stop: tuple[str, ...] = ()  # strings that end an answer, beside those of the request
    own: str | None = None  # a word that marks a worker's template of this family; None: no worker's template is used
    multi_turn: bool = True
    thinks: bool | None = None  # unless a request says otherwise; None: it never does

    @property
    def translates(self) -> bool:
        """Whether this is a format for translations, whose requests name languages."""
        return self.name == "translategemma_template"

    @property
    def thinking(self) -> Thinking | None:
        """How a request switches reasoning; None: it can't."""
        return None if self.thinks is None else CHAT_TEMPLATE

    def limited(self, capabilities: Capabilities) -> Capabilities:
        """The given capabilities of a worker, limited to this format."""
        return replace(
            capabilities,
            modalities=("text",),
            tools=False,
            thinking=self.thinks is not None,
            multi_turn=self.multi_turn,
            translates=self.translates,
        )

    def endpoints(self, endpoints: Collection[Endpoint]) -> frozenset[Endpoint]:
        """The usable endpoints of a worker: all without its template, and chats by its completions endpoint."""
        kept = {endpoint for endpoint in endpoints if endpoint.meaning.prompt is None}
        found = (endpoint for endpoint in kept if endpoint.path == COMPLETIONS)
        return frozenset(kept | {Endpoint(CHAT, upstream_path=one.upstream_path or one.path) for one in found})


_IM: Final = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")

FORMATS: Final[Mapping[PromptFormatName, PromptFormat]] = {
    one.name: one
    for one in (
        PromptFormat("generic", ("\nUser:",), own=""),
        PromptFormat("mistral_template", ("</s>", "[INST]"), own="[INST]"),
        PromptFormat("qwen3_template", _IM, own="<|im_start|>", thinks=True),
        PromptFormat("gemma4_template", ("<turn|>", "<|turn>"), own="<|turn>", thinks=False),
        PromptFormat("translategemma_template", ("<end_of_turn>", "<start_of_turn>"), multi_turn=False),
        PromptFormat("chatml", _IM),
        PromptFormat("alpaca", ("### Instruction:",), multi_turn=False),
        PromptFormat("raw", multi_turn=False),
    )
}


def written_here(name: PromptFormatName, template: str | None) -> PromptFormat | None:
    """The format in which llmux writes the prompts; None: the worker does. `template`: see `Adapter.chat_template`."""
    found = FORMATS[name]
    if found.own is None:
        return found
    return None if template is None or (template and found.own in template) else found
