"""The worker program for language models on vLLM: `/v1/chat/completions`, the count of its tokens, and `/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import llguidance.hf  # type: ignore[import-not-found]  # comes with vLLM
import prometheus_client
from llguidance import LLMatcher
from PIL import Image

from runtimes.sdk.body import Body
from runtimes.sdk.chat import parameters
from runtimes.sdk.chat.grammar import Grammar, grammar
from runtimes.sdk.chat.pictures import taker
from runtimes.sdk.chat.tokenizer import render_prompt
from runtimes.sdk.chat.tokens import Ending, Reused, Token
from runtimes.sdk.chat.worker import Conversation, Run, TextWorker
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.parameters import used
from runtimes.sdk.server import Settings, serve
from runtimes.vllm.worker.engine import Engine, Prompt
from runtimes.vllm.worker.model import Loaded, loaded

SALT = "cache_salt"
OWN_PARAMETERS = {SALT: used("only requests with the same one use each other's prompts again")}


@dataclass(frozen=True, slots=True)
class Options:
    """The worker's options (adapter/__init__.py). `engine` are vLLM's engine arguments, `extra_args` further ones as words."""

    engine: dict[str, Any]
    extra_args: list[str]
    tool_format: str
    chat_template: str | None
    chat_template_kwargs: dict[str, object]


class VllmWorker(TextWorker[Prompt]):
    """One language model. The pool's threads prepare prompts and read results; the engine generates for all requests."""

    chat_parameters = {**parameters.CHAT, **OWN_PARAMETERS}  # noqa: RUF012
    completion_parameters = {**parameters.COMPLETIONS, **OWN_PARAMETERS}  # noqa: RUF012
    enforces = True
    context_key = "max_model_len"
    language: Loaded

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.options = Options(**settings.options)
        self.engine = Engine(asyncio.get_running_loop())
        self.meters.registry.register(prometheus_client.REGISTRY)  # where vLLM counts

    def load(self) -> None:
        """Load, and generate one token."""
        self.engine.start(self.options.engine, self.options.extra_args)
        client = self.engine.client
        self.language = loaded(
            client.model_config,
            client.get_tokenizer(),
            chat_template=self.options.chat_template,
            tool_format=self.options.tool_format,
        )
        self.context = client.model_config.max_model_len
        self.engine.wait(self.engine.try_out())

    def close(self) -> None:
        """End the engine's processes."""
        self.engine.close()

    def prompt(self, conversation: Conversation) -> Prompt:
        """The prompt, with a grammar if a schema or a tool choice constrains the answer."""
        images: list[Image.Image] = []
        tools, arguments = conversation.tools, {**self.options.chat_template_kwargs, **conversation.arguments}
        text, thinking = render_prompt(self.language, conversation.messages, tools.offered, arguments, taker(images))
        inputs = self._engine_inputs(self.language.encode(text), conversation.body, "messages", images)
        tokens = inputs["prompt_token_ids"]
        found = grammar(self.language, tokens, tools, conversation.schema, thinking=thinking, mark=self._special_token)
        if found is not None:
            self._check_schemas(found)
        return Prompt(tokens, thinking, inputs, None if found is None else found.text)

    def prompt_from_tokens(self, tokens: list[int], body: Body) -> Prompt:
        """The prompt is these tokens, without pictures or a grammar."""
        return Prompt(tokens, inputs=self._engine_inputs(tokens, body, "prompt"))

    def generate(self, run: Run[Prompt]) -> Iterable[Token | Ending | Reused]:
        """Submit the run to the engine."""
        return self.engine.generate(run, self.language.ends)

    def _engine_inputs(self, tokens: list[int], body: Body, param: str, images: Sequence[Image.Image] = ()) -> Any:
        self.token_budget(None, Prompt(tokens), param)
        prompt: dict[str, Any] = {"prompt_token_ids": tokens}
        if images:
            prompt["multi_modal_data"] = {"image": list(images)}
        if salt := body.text(SALT):
            prompt[SALT] = salt
        return self.engine.wait(self.engine.prepare(prompt, param))

    def _check_schemas(self, wanted: Grammar) -> None:
        """Raises a WorkerError that names the unsupported schema."""
        for embedded in wanted.schemas:
            wrong = LLMatcher.validate_grammar(
                LLMatcher.grammar_from_json_schema(embedded.schema), self._grammar_tokenizer
            )
            if wrong:
                message = f"{embedded.param}: {embedded.purpose} can't be held to this schema: {wrong}"
                raise WorkerError(message, code="schema_unusable", param=embedded.param)

    def _special_token(self, text: str) -> int | None:
        token = self.language.single_token(text)
        return token if token is not None and self._grammar_tokenizer.is_special_token(token) else None

    @cached_property
    def _grammar_tokenizer(self) -> Any:
        """The tokenizer in the form that the engine's grammars use. Takes about a second for a large vocabulary."""
        return llguidance.hf.from_tokenizer(self.language.tokenizer, self.language.vocabulary)


if __name__ == "__main__":
    serve(VllmWorker)
