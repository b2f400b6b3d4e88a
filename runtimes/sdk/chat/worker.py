"""The base of workers for language models, with OpenAI's API: chats, completions, and the count of a chat's tokens.

A runtime's worker subclasses `TextWorker`: it loads the model, renders prompts and generates tokens. The pool's threads do
the rest of each request's work.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from runtimes.sdk import parameters
from runtimes.sdk.body import Body
from runtimes.sdk.chat import request as requests
from runtimes.sdk.chat import schema, tools
from runtimes.sdk.chat.answers import Answer
from runtimes.sdk.chat.formats.pieces import Piece
from runtimes.sdk.chat.language import Language
from runtimes.sdk.chat.request import Generation
from runtimes.sdk.chat.response_builder import Parser, Plain, ResponseBuilder, parser_of
from runtimes.sdk.chat.schema import Schema
from runtimes.sdk.chat.tokens import Ending, Reused, Token
from runtimes.sdk.chat.tools import Tools
from runtimes.sdk.errors import WorkerError, unsupported
from runtimes.sdk.parameters import Table
from runtimes.sdk.server import Endpoint, Worker, events, wait_first_item
from runtimes.sdk.worker_pool import Cancel

StartedAnswer = tuple[Answer, Iterator[list[Piece]]]
"""An answer that has begun, and an iterator of its pieces as the model generates them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a rendered prompt. `arguments` go to the chat template; `schema` limits the answer, None: any text.

    `body` is the body of the whole request.
    """

    messages: object
    tools: Tools
    arguments: Mapping[str, object]
    schema: Schema | None
    body: Body

    def without_constraints(self) -> Conversation:
        """The same prompt without constraints, for a request that generates nothing."""
        return dataclasses.replace(self, tools=dataclasses.replace(self.tools, must=()), schema=None)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt. `thinking`: it ends within reasoning. `stops`: stop strings beside those of the request."""

    tokens: list[int]
    thinking: bool = False
    stops: tuple[str, ...] = field(default=(), kw_only=True)


P = TypeVar("P", bound=Prompt)


@dataclass(frozen=True, slots=True)
class Run(Generic[P]):
    """One generation: `limit` tokens at most. It ends early when its client disconnects (`cancel`) or its reader has `enough`."""

    prompt: P
    request: Generation
    limit: int
    cancel: Cancel
    enough: Cancel

    @property
    def unwanted(self) -> bool:
        """Does nobody wait for more tokens?"""
        return self.cancel.is_set or self.enough.is_set


class TextWorker(Worker, Generic[P]):
    """One language model. `language`, and `context` (tokens of prompt and answer together), are set once it is loaded."""

    chat_parameters: ClassVar[Table]
    completion_parameters: ClassVar[Table]
    enforces: ClassVar[bool] = False  # can an answer be made to follow a schema, or to call a tool?
    context_key: ClassVar[str] = "n_ctx"  # of the configuration
    language: Language
    context: int

    @abc.abstractmethod
    def prompt(self, conversation: Conversation) -> P:
        """The prompt of a conversation's next turn. Raises WorkerError."""

    @abc.abstractmethod
    def prompt_from_tokens(self, tokens: list[int], body: Body) -> P:
        """The prompt made of these tokens, for a text to continue."""

    @abc.abstractmethod
    def generate(self, run: Run[P]) -> Iterable[Token | Ending | Reused]:
        """Start to generate. Yields tokens as they come, then the reason of the end; stops once the run is unwanted.

        Raises WorkerError.
        """

    def parser(self, conversation: Conversation, prompt: P) -> Parser:
        """The parser for the answer to this prompt."""
        return parser_of(self.language, conversation.tools, thinking=prompt.thinking)

    def token_budget(self, requested: int | None, prompt: P, param: str) -> int:
        """The number of tokens that may be generated. Raises WorkerError if the prompt leaves no room."""
        return requests.token_budget(requested, len(prompt.tokens), self.context, param, self.context_key)

    def routes(self) -> Mapping[str, Endpoint]:
        """The endpoints: the same as in the adapter."""
        return {
            "POST /v1/chat/completions": self.chat,
            "POST /v1/chat/completions/input_tokens": self.input_tokens,
            "POST /v1/completions": self.completions,
        }

    async def chat(self, request: Request) -> Response:
        """A conversation's next turn."""
        body = await Body.parse(request)
        parameters.check(self.chat_parameters, body.values)
        generation = requests.generation(body, self.language, requests.chat_logprobs(body))
        conversation = self._read_conversation(body)

        def begin(cancel: Cancel) -> StartedAnswer:
            prompt = self.prompt(conversation)
            parser = self.parser(conversation, prompt)
            return self._begin_answer("chat", prompt, parser, generation, cancel, parallel=conversation.tools.parallel)

        return await self._respond(generation, begin)

    async def input_tokens(self, request: Request) -> Response:
        """The number of tokens in the prompt of a conversation. The answer has llama.cpp's form."""
        body = await Body.parse(request)
        parameters.check(self.chat_parameters, body.values)
        conversation = self._read_conversation(body).without_constraints()

        def count(_cancel: Cancel) -> int:
            return len(self.prompt(conversation).tokens)

        return JSONResponse({"object": "response.input_tokens", "input_tokens": await self.pool.run(count)})

    async def completions(self, request: Request) -> Response:
        """A text's continuation."""
        body = await Body.parse(request)
        parameters.check(self.completion_parameters, body.values)
        logprobs = body.integer("logprobs", None, 0, requests.MAX_LOGPROBS)
        generation = requests.generation(body, self.language, logprobs)
        shows_special = not body.flag("skip_special_tokens", default=True)

        def begin(cancel: Cancel) -> StartedAnswer:
            prompt = self.prompt_from_tokens(self._prompt_tokens(body), body)
            return self._begin_answer("text", prompt, Plain(), generation, cancel, shows_special=shows_special)

        return await self._respond(generation, begin)

    def _read_conversation(self, body: Body) -> Conversation:
        choice, answer_schema = tools.requested_tools(body, self.language), schema.requested_schema(body)
        if choice.must and not self.enforces:
            raise unsupported("tool_choice", "the model decides here whether it calls a tool: auto, or none")
        if answer_schema is not None and not self.enforces:
            raise unsupported("response_format", "this runtime can't hold an answer to a schema; ask for JSON in words")
        arguments = requests.template_arguments(body, self.language)
        return Conversation(body.values.get("messages"), choice, arguments, answer_schema, body)

    async def _respond(self, generation: Generation, begin: Callable[[Cancel], StartedAnswer]) -> Response:
        def chunks(cancel: Cancel) -> Iterator[Any]:
            answer, pieces = begin(cancel)
            yield from answer.chunks(pieces)
            self._count_tokens(answer)

        def whole(cancel: Cancel) -> Any:
            answer, pieces = begin(cancel)
            found = answer.to_object(pieces)
            self._count_tokens(answer)
            return found

        if generation.stream:
            return events(await wait_first_item(self.pool.stream(chunks)))
        return JSONResponse(await self.pool.run(whole))

    def _count_tokens(self, answer: Answer) -> None:
        self.meters.tokens_in.inc(answer.prompt)
        self.meters.tokens_out.inc(answer.builder.outcome.tokens)

    def _begin_answer(
        self,
        kind: Literal["chat", "text"],
        prompt: P,
        parser: Parser,
        generation: Generation,
        cancel: Cancel,
        *,
        parallel: bool = True,
        shows_special: bool = False,
    ) -> StartedAnswer:
        size = len(prompt.tokens)
        limit = self.token_budget(generation.max_tokens, prompt, "messages" if kind == "chat" else "prompt")
        run = Run(prompt, generation, limit, cancel, enough=Cancel())
        results = self.generate(run)
        stops = (*generation.stops, *prompt.stops)
        builder = ResponseBuilder(self.language, parser, stops, parallel, shows_special)
        logprobs = generation.sampling.logprobs is not None
        answer = Answer(kind, self.settings.model, self.language, builder, size, logprobs, generation.usage)
        return answer, builder.read(results, run.enough)

    def _prompt_tokens(self, body: Body) -> list[int]:
        given = body.values.get("prompt")
        if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
            given = given[0]
        if isinstance(given, str) and given:
            return self.language.encode_prompt(given)
        size = self.language.vocabulary
        if isinstance(given, list) and given and all(type(item) is int and 0 <= item < size for item in given):
            return given
        raise WorkerError(f"prompt must be one text, or a list of token ids below {size}.", param="prompt")
