"""The worker of language models: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
from runtimes.transformers.worker.chat.guide import Guide, Guides
from runtimes.transformers.worker.chat.model import Loaded, Options, load
from runtimes.transformers.worker.chat.prompt import Prompt
from runtimes.transformers.worker.chat.response_builder import Plain, ResponseBuilder, parser_of
from runtimes.transformers.worker.chat.sampling import Sampling
from runtimes.transformers.worker.parameters import CHAT, COMPLETIONS


class ChatWorker(Worker):
    """One language model. Requests are prepared and read in threads of the lane; the decoder generates for all."""

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
        """What the adapter promises (language.py)."""
        return {"POST /v1/chat/completions": self.chat, "POST /v1/completions": self.completions}

    async def chat(self, request: Request) -> Response:
        """A conversation's next turn."""
        body = await Body.of(request)
        parameters.check(CHAT, body.values)
        logprobs = requests.chat_logprobs(body)
        generation = requests.generation(body, self.loaded, logprobs)
        choice, said = tools.wanted(body, self.loaded), schema.wanted(body)
        arguments = requests.template_arguments(body, self.loaded)

        def begin(cancel: Cancel) -> tuple[Answer, Iterator[Any]]:
            prompt = prompts.chat(self.loaded, body.values.get("messages"), choice.offered, arguments)
            parser = parser_of(self.loaded, choice, thinking=prompt.thinking)
            builder = ResponseBuilder(self.loaded, parser, generation.stops, choice.parallel)
            guide = grammar.guide(self.guides, self.loaded, prompt, choice, said)
            job = self._job(prompt, generation, cancel, "messages", guide)
            answer = Answer(
                "chat",
                self.settings.model,
                self.loaded,
                builder,
                len(prompt.tokens),
                logprobs is not None,
                generation.usage,
            )
            return answer, builder.read(job.results(), job.enough)

        return await self._answered(generation, begin)

    async def completions(self, request: Request) -> Response:
        """A text's continuation."""
        body = await Body.of(request)
        parameters.check(COMPLETIONS, body.values)
        logprobs = body.whole("logprobs", None, 0, requests.MAX_LOGPROBS)
        generation = requests.generation(body, self.loaded, logprobs)

        def begin(cancel: Cancel) -> tuple[Answer, Iterator[Any]]:
            prompt = Prompt(self._plain(body))
            builder = ResponseBuilder(self.loaded, Plain(), generation.stops)
            job = self._job(prompt, generation, cancel, "prompt")
            answer = Answer(
                "text",
                self.settings.model,
                self.loaded,
                builder,
                len(prompt.tokens),
                logprobs is not None,
                generation.usage,
            )
            return answer, builder.read(job.results(), job.enough)

        return await self._answered(generation, begin)

    async def _answered(self, generation: requests.Generation, begin: Any) -> Response:
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

    def _job(
        self, prompt: Prompt, generation: requests.Generation, cancel: Cancel, param: str, guide: Guide | None = None
    ) -> Job:
        most = requests.room(generation.max_tokens, len(prompt.tokens), self.options.n_ctx, param)
        job = Job(prompt.tokens, most, generation.sampling, cancel, self.loaded.ends, prompt.pictures, guide)
        self.decoder.submit(job)
        return job

    def _plain(self, body: Body) -> list[int]:
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
