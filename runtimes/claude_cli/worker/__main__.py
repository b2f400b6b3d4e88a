"""The worker of a model behind a command line program: chat completions, for each of which it runs the program once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from runtimes.claude_cli.worker import conversation
from runtimes.claude_cli.worker.answer import Answer
from runtimes.claude_cli.worker.output import Result
from runtimes.claude_cli.worker.program import Options, Program
from runtimes.sdk.body import Body
from runtimes.sdk.parameters import without_effect
from runtimes.sdk.server import Endpoint, Settings, Worker, events, serve, wait_first_item
from runtimes.sdk.worker_pool import Cancel


class ProgramWorker(Worker):
    """The worker of one program, and its running processes."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._options = Options(**settings.options)

    def load(self) -> None:
        """Does nothing: there is no model to load, and a trial request would cost money."""
        self._program = Program(self._options)

    def close(self) -> None:
        if self.ready:
            self._program.close()

    def routes(self) -> Mapping[str, Endpoint]:
        return {"POST /v1/chat/completions": self.chat}

    async def chat(self, request: Request) -> Response:
        conversation_request = conversation.parse_request((await Body.parse(request)).values)
        for name in conversation_request.ignored:
            without_effect(name)
        answer = Answer(self._options.upstream_model, conversation_request.include_usage)

        def run(cancel: Cancel) -> Iterator[str | Result]:
            return self._program.run(conversation_request, cancel)

        if conversation_request.stream:
            return events(await wait_first_item(self.pool.stream(lambda cancel: answer.chunks(run(cancel)))))
        return JSONResponse(await self.pool.run(lambda cancel: answer.to_object(run(cancel))))


if __name__ == "__main__":
    serve(ProgramWorker)
