"""The worker program for language models: `/v1/chat/completions`, the count of its tokens, and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from runtimes.sdk import parameters
from runtimes.sdk.body import Body
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.server import Endpoint, Settings, Worker, events, serve, started
from runtimes.sdk.worker_pool import Cancel
from runtimes.transformers.worker.chat import grammar, schema, tools
from runtimes.transformers.worker.chat import prompt as prompts
from runtimes.transformers.worker.chat import request as requests
from runtimes.transformers.worker.chat.answers import Answer
from runtimes.transformers.worker.chat.decoder import Decoder, Job
from runtimes.transformers.worker.chat.formats.pieces import Piece
from runtimes.transformers.worker.chat.guide import Guide, Guides
from runtimes.transformers.worker.chat.model import Loaded, Options, load
from runtimes.transformers.worker.chat.prompt import Prompt
from runtimes.transformers.worker.chat.response_builder import Parser, Plain, ResponseBuilder, parser_of
from runtimes.transformers.worker.chat.sampling import Sampling
from runtimes.transformers.worker.parameters import CHAT, COMPLETIONS

Begun = tuple[Answer, Iterator[list[Piece]]]
"""An answer, and the pieces it is built from as they are generated."""


class ChatWorker(Worker):
    """One language model. The pool's threads prepare prompts and read results; the decoder generates for all requests."""

    loaded: Loaded
    decoder: Decoder
    guides: Guides

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.options = Options(**settings.options)

    def load(self) -> None:
        """Load, and generate one token."""
        self.loaded = load(self.options)
        self.guides = Guides(self.loaded)
        chunk = self.options.prefill_tokens
        self.decoder = Decoder(self.loaded.model, width=self.settings.parallel, chunk=chunk)
        trial = Job([min(self.loaded.ends, default=0)], 1, Sampling(temperature=0), Cancel(), self.loaded.ends)
        self.decoder.submit(trial)
        list(trial.results())

    def routes(self) -> Mapping[str, Endpoint]:
        """The endpoints that the adapter lists (adapter/language.py)."""
        return {
            "POST /v1/chat/completions": self.chat,
            "POST /v1/chat/completions/input_tokens": self.input_tokens,
            "POST /v1/completions": self.completions,
        }

    async def chat(self, request: Request) -> Response:
        """A conversation's next turn."""
        body = await Body.of(request)
        parameters.check(CHAT, body.values)
        logprobs = requests.chat_logprobs(body)
        generation = requests.generation(body, self.loaded, logprobs)
        choice, answer_schema = tools.wanted(body, self.loaded), schema.wanted(body)
        arguments = requests.template_arguments(body, self.loaded)

        def begin(cancel: Cancel) -> Begun:
            prompt = prompts.chat(self.loaded, body.values.get("messages"), choice.offered, arguments)
            guide = grammar.guide(self.guides, self.loaded, prompt, choice, answer_schema)
            parser = parser_of(self.loaded, choice, thinking=prompt.thinking)
            return self._begin("chat", prompt, parser, generation, cancel, guide=guide, parallel=choice.parallel)

        return await self._answered(generation, begin)

    async def input_tokens(self, request: Request) -> Response:
        """How many tokens the prompt of a conversation has; the answer is llama.cpp's."""
        body = await Body.of(request)
        parameters.check(CHAT, body.values)
        choice = tools.wanted(body, self.loaded)
        arguments = requests.template_arguments(body, self.loaded)

        def count(_cancel: Cancel) -> int:
            prompt = prompts.chat(self.loaded, body.values.get("messages"), choice.offered, arguments)
            return len(prompt.tokens)

        return JSONResponse({"object": "response.input_tokens", "input_tokens": await self.pool.run(count)})

    async def completions(self, request: Request) -> Response:
        """A text's continuation."""
        body = await Body.of(request)
        parameters.check(COMPLETIONS, body.values)
        logprobs = body.whole("logprobs", None, 0, requests.MAX_LOGPROBS)
        generation = requests.generation(body, self.loaded, logprobs)
        shows_special = not body.flag("skip_special_tokens", default=True)

        def begin(cancel: Cancel) -> Begun:
            prompt = Prompt(self._prompt_tokens(body))
            return self._begin("text", prompt, Plain(), generation, cancel, shows_special=shows_special)

        return await self._answered(generation, begin)

    async def _answered(self, generation: requests.Generation, begin: Callable[[Cancel], Begun]) -> Response:
        def chunks(cancel: Cancel) -> Iterator[Any]:
            answer, pieces = begin(cancel)
            yield from answer.chunks(pieces)
            self._count(answer)

        def whole(cancel: Cancel) -> Any:
            answer, pieces = begin(cancel)
            found = answer.whole(pieces)
            self._count(answer)
            return found

        if generation.stream:
            return events(await started(self.pool.stream(chunks)))
        return JSONResponse(await self.pool.run(whole))

    def _count(self, answer: Answer) -> None:
        self.meters.tokens_in.inc(answer.prompt)
        self.meters.tokens_out.inc(answer.builder.outcome.tokens)

    def _begin(
        self,
        kind: Literal["chat", "text"],
        prompt: Prompt,
        parser: Parser,
        generation: requests.Generation,
        cancel: Cancel,
        *,
        guide: Guide | None = None,
        parallel: bool = True,
        shows_special: bool = False,
    ) -> Begun:
        """Submit the prompt to the decoder."""
        param = "messages" if kind == "chat" else "prompt"
        size = len(prompt.tokens)
        limit = requests.room(generation.max_tokens, size, self.options.n_ctx, param)
        job = Job(prompt.tokens, limit, generation.sampling, cancel, self.loaded.ends, prompt.pictures, guide)
        self.decoder.submit(job)
        builder = ResponseBuilder(self.loaded, parser, generation.stops, parallel, shows_special)
        logprobs = generation.sampling.logprobs is not None
        answer = Answer(kind, self.settings.model, self.loaded, builder, size, logprobs, generation.usage)
        return answer, builder.read(job.results(), job.enough)

    def _prompt_tokens(self, body: Body) -> list[int]:
        given = body.values.get("prompt")
        if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
            given = given[0]
        if isinstance(given, str) and given:
            tokens: list[int] = self.loaded.tokenizer.encode(given)
            return tokens
        size = self.loaded.model.config.get_text_config().vocab_size
        if isinstance(given, list) and given and all(type(item) is int and 0 <= item < size for item in given):
            return given
        raise WorkerError(f"prompt must be one text, or a list of token ids below {size}.", param="prompt")


if __name__ == "__main__":
    serve(ChatWorker)
