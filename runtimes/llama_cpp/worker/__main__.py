"""The worker program for GGUF models on llama-cpp-python: one request at a time, cancelled between two tokens or batches.

The library keeps the last prompt. It reads the next prompt only from the first difference on.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import llama_cpp
import numpy as np
from llama_cpp import LogitsProcessorList

from runtimes.llama_cpp.worker.model import Loaded, Options, load
from runtimes.llama_cpp.worker.parameters import CHAT, COMPLETIONS
from runtimes.sdk.body import Body
from runtimes.sdk.chat import messages
from runtimes.sdk.chat.request import Sampling
from runtimes.sdk.chat.template import ChatTemplate, ends_thinking, no_template
from runtimes.sdk.chat.tokens import Ending, Token
from runtimes.sdk.chat.worker import Conversation, Run, TextWorker
from runtimes.sdk.chat.worker import Prompt as TextPrompt
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.server import Settings, serve

SEEDS: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class Prompt(TextPrompt):
    """`reuse`: may the cache of an earlier prompt be used?"""

    reuse: bool = True


class LlamaCppWorker(TextWorker[Prompt]):
    """One model, which works on one request at a time."""

    chat_parameters = CHAT
    completion_parameters = COMPLETIONS
    language: Loaded

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.options = Options(**settings.options)

    def load(self) -> None:
        """Load, and generate one token."""
        self.language = load(self.options)
        engine = self.language.engine
        self.context = engine.n_ctx()
        self.template = ChatTemplate(self.language.template, self.language.special) if self.language.template else None
        next(engine.generate([max(0, engine.token_bos())], temp=0.0))
        engine.reset()

    def prompt(self, conversation: Conversation) -> Prompt:
        """The prompt, rendered by the configured chat format, or else by the file's template."""
        turns = messages.read_messages(self.language, conversation.messages)
        reuse = conversation.body.flag("cache_prompt", default=True)
        if self.language.formatter is not None:
            found = self.language.formatter(messages=turns)
            stops = [found.stop] if isinstance(found.stop, str) else found.stop or []
            return Prompt(self.language.encode(found.prompt), stops=tuple(filter(None, stops)), reuse=reuse)
        if self.template is None:
            raise no_template()
        rendered = self.template.render(turns, conversation.tools.offered, conversation.arguments)
        return Prompt(self.language.encode(rendered), ends_thinking(self.language, rendered), reuse=reuse)

    def prompt_from_tokens(self, tokens: list[int], body: Body) -> Prompt:
        """The prompt is these tokens, unchanged."""
        return Prompt(tokens, reuse=body.flag("cache_prompt", default=True))

    def generate(self, run: Run[Prompt]) -> Iterable[Token | Ending]:
        """Generate on the thread that reads the tokens."""
        return self._generate_tokens(run)

    def _generate_tokens(self, run: Run[Prompt]) -> Iterator[Token | Ending]:
        engine, sampling = self.language.engine, run.request.sampling
        if not run.prompt.reuse:
            engine.reset()
        engine.set_seed(secrets.randbelow(SEEDS) if sampling.seed is None else sampling.seed % SEEDS)
        engine.check = run.cancel.check
        made = 0
        try:
            for token in engine.generate(run.prompt.tokens, **_sampling_arguments(sampling)):
                made += 1
                yield self._to_token(token, sampling)
                if token in self.language.ends:
                    yield "stop"
                    return
                if made >= run.limit:
                    yield "length"
                    return
                if run.unwanted:
                    return
        except RuntimeError as error:
            engine.reset()
            raise WorkerError(f"llama.cpp can't read this prompt: {error}", code="worker_failed", status=500) from error

    def _to_token(self, token: int, sampling: Sampling) -> Token:
        """The token, with log probabilities if requested. Call it before the next token is read, which changes the scores."""
        if sampling.logprobs is None:
            return Token(token)
        engine = self.language.engine
        scores = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(engine.ctx, -1), shape=(engine.n_vocab(),))
        scores = scores - scores.max()
        scores = scores - np.log(np.exp(scores).sum())
        best = np.argsort(scores)[::-1][: sampling.logprobs]
        return Token(token, float(scores[token]), tuple((int(other), float(scores[other])) for other in best))


def _sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    return {
        "temp": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logits_processor": LogitsProcessorList([_bias_processor(sampling)]) if sampling.logit_bias else None,
    }


def _bias_processor(sampling: Sampling) -> Any:
    tokens, values = (list(part) for part in (sampling.logit_bias.keys(), sampling.logit_bias.values()))

    def processor(_tokens: Any, scores: Any) -> Any:
        scores[tokens] += values
        return scores

    return processor


if __name__ == "__main__":
    serve(LlamaCppWorker)
