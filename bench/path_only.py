"""The smallest application around the data path: no auth, no resolving, no admission. Shows what forwarding alone costs."""

from __future__ import annotations

import argparse

import uvicorn

from supervisor.dialects.openai import OPENAI
from supervisor.errors import LlmuxError
from supervisor.gateway.attempt import Attempt
from supervisor.gateway.body.body import read_body
from supervisor.gateway.disconnect import CancelOnDisconnect, Receive, Scope, Send
from supervisor.gateway.error_response import error_body, error_headers
from supervisor.gateway.forward import forward
from supervisor.gateway.request import Request
from supervisor.gateway.response_cycle import ResponseCycle
from supervisor.host.store.request_buffer import RequestBuffer
from supervisor.host.upstream.upstream import UpstreamPool
from supervisor.server.protocol import GuardedProtocol

BODY_LIMIT = 64 * 1024 * 1024


class PathOnly:
    """Forwards every request to one upstream."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._pool: UpstreamPool | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        pool = self._pool = self._pool or UpstreamPool("127.0.0.1", self._port, "Bearer worker-key")
        try:
            body = await read_body(scope, receive, BODY_LIMIT)
            with CancelOnDisconnect(scope):
                request = Request(b"bench", pool.loop.time(), OPENAI)
                cycle = ResponseCycle(scope, receive, send, request, RequestBuffer())
                request.attempt = Attempt(
                    path=scope["raw_path"], headers=cycle.head.for_worker, body=RequestBuffer(data=body)
                )
                await forward(cycle, pool)
        except LlmuxError as error:
            data = error_body(error, OPENAI)
            await send({"type": "http.response.start", "status": error.status, "headers": error_headers(error, data)})
            await send({"type": "http.response.body", "body": data, "more_body": False})


def main() -> None:
    """`python -m bench.path_only --port P --upstream Q`."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--upstream", type=int, required=True)
    given = flags.parse_args()
    uvicorn.run(
        PathOnly(given.upstream),
        host="127.0.0.1",
        port=given.port,
        http=GuardedProtocol,
        ws="none",
        lifespan="off",
        loop="uvloop",
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
    )


if __name__ == "__main__":
    main()
