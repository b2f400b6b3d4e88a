"""The worker program for language models: `/v1/chat/completions`, the count of its tokens, and `/v1/completions`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from runtimes.sdk.body import Body
from runtimes.sdk.chat.grammar import grammar
from runtimes.sdk.chat.parameters import CHAT, COMPLETIONS
from runtimes.sdk.chat.request import Sampling
from runtimes.sdk.chat.response_builder import Parser
from runtimes.sdk.chat.schema import Schema
from runtimes.sdk.chat.tokens import Ending, Token
from runtimes.sdk.chat.tools import Tools
from runtimes.sdk.chat.worker import Conversation, Run, TextWorker
from runtimes.sdk.errors import unsupported
from runtimes.sdk.server import Settings, serve
from runtimes.sdk.worker_pool import Cancel
from runtimes.transformers.worker.chat import prompt as prompts
from runtimes.transformers.worker.chat.decoder import Decoder, Job
from runtimes.transformers.worker.chat.guide import Guides
from runtimes.transformers.worker.chat.model import Loaded, Options, load
from runtimes.transformers.worker.chat.prompt import Prompt
from runtimes.transformers.worker.chat.response_template import TemplateParser


class ChatWorker(TextWorker[Prompt]):
    """One language model. The pool's threads prepare prompts and read results; the decoder generates for all requests."""

    chat_parameters = CHAT
    completion_parameters = COMPLETIONS
    enforces = True
    language: Loaded
    decoder: Decoder
    guides: Guides

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.options = Options(**settings.options)
        self.context = self.options.n_ctx

    def load(self) -> None:
        """Load, and generate one token."""
        self.language = load(self.options)
        self.guides = Guides(self.language)
        chunk = self.options.prefill_tokens
        self.decoder = Decoder(self.language.model, width=self.settings.parallel, chunk=chunk)
        trial = Job([min(self.language.ends, default=0)], 1, Sampling(temperature=0), Cancel(), self.language.ends)
        self.decoder.submit(trial)
        list(trial.out)

    def prompt(self, conversation: Conversation) -> Prompt:
        """The prompt, with a guide if a schema or a tool choice constrains the answer."""
        tools = conversation.tools
        if self.language.answers is not None:
            _refuse_forced(tools, conversation.schema)
        prompt = prompts.chat(self.language, conversation.messages, tools.offered, conversation.arguments)
        found = grammar(
            self.language,
            prompt.tokens,
            tools,
            conversation.schema,
            thinking=prompt.thinking,
            mark=self.guides.mark,
        )
        return prompt if found is None else dataclasses.replace(prompt, guide=self.guides.guide(found))

    def parser(self, conversation: Conversation, prompt: Prompt) -> Parser:
        """The parser of the model's format; for a model with none of our formats, the checkpoint's response template."""
        if self.language.answers is None:
            return super().parser(conversation, prompt)
        text = self.language.decode(prompt.tokens)
        return TemplateParser(self.language.answers, text, conversation.tools.offered)

    def prompt_from_tokens(self, tokens: list[int], body: Body) -> Prompt:
        """The prompt is these tokens, without pictures or a guide."""
        return Prompt(tokens)

    def generate(self, run: Run[Prompt]) -> Iterable[Token | Ending]:
        """Submit the run to the decoder."""
        prompt, sampling = run.prompt, run.request.sampling
        ends = self.language.ends
        job = Job(prompt.tokens, run.limit, sampling, run.cancel, ends, prompt.pictures, prompt.guide, run.enough)
        self.decoder.submit(job)
        return iter(job.out)


def _refuse_forced(tools: Tools, schema: Schema | None) -> None:
    """Raises WorkerError for forced calls or a schema: response templates have no grammar of calls."""
    if tools.must:
        raise unsupported("tool_choice", "this model's calls can be read, not forced: auto, or none")
    if schema is not None and tools.offered:
        raise unsupported("response_format", "this model's calls can't be told from an answer in JSON: leave out tools")


if __name__ == "__main__":
    serve(ChatWorker)
