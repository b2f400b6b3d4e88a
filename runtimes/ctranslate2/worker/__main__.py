"""The worker program for CTranslate2's language and translation models.

A conversation with a translation model is one text to translate: the prompt is the source, the answer is the target. Tokens
come one by one, and a request can be cancelled between any two; a beam search returns all tokens at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from runtimes.ctranslate2.worker.model import Loaded, Options, load
from runtimes.ctranslate2.worker.parameters import CHAT, COMPLETIONS
from runtimes.sdk.body import Body
from runtimes.sdk.chat import messages
from runtimes.sdk.chat.request import Generation, Sampling
from runtimes.sdk.chat.template import ChatTemplate, ends_thinking, no_template
from runtimes.sdk.chat.tokens import Ending, Token
from runtimes.sdk.chat.worker import Conversation, Run, TextWorker
from runtimes.sdk.chat.worker import Prompt as TextPrompt
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.server import Settings, serve
from runtimes.sdk.worker_pool import Cancel

MAX_BEAMS: Final = 20
_CODES: Final = ("source_lang_code", "target_lang_code")


@dataclass(frozen=True, slots=True)
class Prompt(TextPrompt):
    """`prefix`: tokens that a translation begins with. `beams`: beams of the search; 1: no beam search."""

    prefix: tuple[str, ...] = ()
    beams: int = 1


class CTranslate2Worker(TextWorker[Prompt]):
    """One model, which computes in CTranslate2's own threads."""

    chat_parameters = CHAT
    completion_parameters = COMPLETIONS
    language: Loaded

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.options = Options(**settings.options)
        self.context = self.options.n_ctx

    def load(self) -> None:
        """Load the model, and generate one token."""
        self.language = load(self.options, self.settings.parallel)
        source = self.language.template
        self.template = ChatTemplate(source, self.language.special) if source else None
        trial = Run(Prompt([0]), Generation(Sampling(temperature=0), 1, (), False, False), 1, Cancel(), Cancel())
        list(self.generate(trial))

    def prompt(self, conversation: Conversation) -> Prompt:
        """One turn by the chat template, or a text to translate."""
        turns = messages.read_messages(self.language, conversation.messages)
        text, beams = messages.single_turn_text(turns), self._beam_count(conversation.body)
        if self.options.kind == "translator":
            if len(turns) > 1:
                message = "messages: a translation model takes the text alone, and nothing from the system."
                raise WorkerError(message, param="messages")
            return self._translation_prompt(text, _language_codes(conversation), beams)
        if self.template is None:
            raise no_template()
        rendered = self.template.render(turns, (), conversation.arguments)
        tokens = self.language.token_ids(self.language.tokenizer.encode(rendered))
        return Prompt(tokens, ends_thinking(self.language, rendered), beams=beams)

    def prompt_from_tokens(self, tokens: list[int], body: Body) -> Prompt:
        """The prompt for these tokens. A text to translate gets its language tokens."""
        beams, given = self._beam_count(body), body.values.get("prompt")
        text = given[0] if isinstance(given, list) and given else given
        if self.options.kind == "translator" and isinstance(text, str):
            return self._translation_prompt(text, {name: body.text(name) for name in _CODES}, beams)
        return Prompt(tokens, beams=beams)

    def token_budget(self, requested: int | None, prompt: Prompt, param: str) -> int:
        """The tokens that may be generated. A translation has its own context, separate from its source's."""
        limit = super().token_budget(requested, prompt, param)
        if self.options.kind == "generator":
            return limit
        most = self.context - len(prompt.prefix) - 1  # the decoder's first token is not part of the answer
        return most if requested is None else min(requested, most)

    def generate(self, run: Run[Prompt]) -> Iterable[Token | Ending]:
        """Generate in CTranslate2's threads."""
        if run.prompt.beams == 1:
            return self._generate_stepwise(run)
        if run.request.sampling.logprobs is not None:
            raise WorkerError("logprobs: a search with beams tells none; set beam_size to 1.", param="logprobs")
        return self._beam_search(run)

    def _generate_stepwise(self, run: Run[Prompt]) -> Iterator[Token | Ending]:
        logprobs = run.request.sampling.logprobs is not None
        prompt, arguments = self.language.token_names(run.prompt.tokens), self._sampling_arguments(run)
        if self.options.kind == "translator":
            steps = self.language.engine.generate_tokens(
                prompt,
                list(run.prompt.prefix) or None,
                max_decoding_length=run.limit + len(run.prompt.prefix),
                min_decoding_length=0,
                max_input_length=0,
                return_log_prob=logprobs,
                **arguments,
            )
        else:
            steps = self.language.engine.generate_tokens(
                prompt,
                max_length=run.limit,
                return_log_prob=logprobs,
                callback=lambda _step: run.unwanted,
                **arguments,
            )
        last = -1
        for step in steps:
            if run.unwanted:
                return
            if step.step < len(run.prompt.prefix):
                continue
            last = step.token_id
            yield Token(last, step.log_prob or 0.0)
        yield "stop" if last == -1 or last in self.language.ends else "length"  # nothing at all: the source is empty

    def _beam_search(self, run: Run[Prompt]) -> Iterator[Token | Ending]:
        prompt, arguments = self.language.token_names(run.prompt.tokens), self._sampling_arguments(run)
        arguments |= {"beam_size": run.prompt.beams, "return_end_token": True, "sampling_topk": 1}
        if self.options.kind == "translator":
            prefix = list(run.prompt.prefix)
            (found,) = self.language.engine.translate_batch(
                [prompt],
                [prefix] if prefix else None,
                max_decoding_length=run.limit + len(prefix),
                min_decoding_length=0,
                max_input_length=0,
                **arguments,
            )
            names = {token: number for number, token in reversed([*enumerate(self.language.target)])}
            tokens = [names[token] for token in found.hypotheses[0][len(prefix) :]]
        else:
            (found,) = self.language.engine.generate_batch(
                [prompt], max_length=run.limit, include_prompt_in_result=False, **arguments
            )
            tokens = found.sequences_ids[0]
        yield from map(Token, tokens)
        yield "stop" if not tokens or tokens[-1] in self.language.ends else "length"

    def _sampling_arguments(self, run: Run[Prompt]) -> dict[str, Any]:
        sampling, ends = run.request.sampling, self.language.ends
        top_k = sampling.top_k if sampling.top_k <= len(self.language.target) else 0
        return {
            "sampling_topk": 1 if 0 in (sampling.temperature, sampling.top_p) else top_k,
            "sampling_topp": sampling.top_p or 1.0,
            "sampling_temperature": sampling.temperature or 1.0,
            "repetition_penalty": sampling.repetition_penalty,
            "end_token": [self.language.target[token] for token in sorted(ends)] or None,
        }

    def _translation_prompt(self, text: str, codes: Mapping[str, str | None], beams: int) -> Prompt:
        language = self.language
        before, prefix = language.languages.prefix_tokens(*(codes.get(name) for name in _CODES))
        if not language.languages.tokens:
            return Prompt(language.encode_prompt(text), beams=beams)
        tokens = language.token_ids([*before, *language.tokenizer.encode(text), *language.after])
        return Prompt(tokens, prefix=tuple(prefix), beams=beams)

    def _beam_count(self, body: Body) -> int:
        return body.integer("beam_size", self.options.beam_size, 1, MAX_BEAMS)


def _language_codes(conversation: Conversation) -> dict[str, str | None]:
    """The source and target language: fields of the request or of the message part, with the names in models' templates."""
    found: dict[str, str | None] = {name: conversation.body.text(name) for name in _CODES}
    given = conversation.messages
    content = given[-1].get("content") if isinstance(given, list) and isinstance(given[-1], dict) else None
    for part in content if isinstance(content, list) else ():
        found |= {name: Body(part).text(name) for name in _CODES if isinstance(part, dict) and part.get(name)}
    return found


if __name__ == "__main__":
    serve(CTranslate2Worker)
