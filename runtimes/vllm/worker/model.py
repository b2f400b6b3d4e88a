"""Facts about the model that an engine has loaded: its tokenizer, limits and inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtimes.sdk.chat.language import defaults_of
from runtimes.sdk.chat.tokenizer import TokenizerLanguage, facts


@dataclass(frozen=True, slots=True)
class Loaded(TokenizerLanguage):
    """The model of an engine. `generation` has the values in generation_config.json that differ from the usual ones."""

    config: Any
    generation: Mapping[str, Any]

    @property
    def takes_images(self) -> bool:
        """Does the model have a vision encoder that is in use?"""
        multimodal = self.config.multimodal_config
        return multimodal is not None and multimodal.get_limit_per_prompt("image") > 0

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        size: int = self.config.get_vocab_size()
        return size

    @property
    def defaults(self) -> Mapping[str, float]:
        """The sampling defaults in generation_config.json."""
        return defaults_of(self.generation)


def loaded(config: Any, tokenizer: Any, *, chat_template: str | None, tool_format: str) -> Loaded:
    """The facts in vLLM's configuration of the model. Raises SystemExit for a tokenizer of another library."""
    if not hasattr(tokenizer, "added_tokens_decoder"):
        raise SystemExit("This model's tokenizer is none of the transformers library; use the runtime vllm_serve.")
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    generation = config.try_get_generation_config()
    ids = generation.get("eos_token_id")
    ends = ids if isinstance(ids, list) else [ids]
    return Loaded(config=config, generation=generation, **facts(tokenizer, ends, tool_format=tool_format))
