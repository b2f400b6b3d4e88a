"""A worker on the SDK that has no model: what it does is said by the request."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time

from starlette.responses import JSONResponse

from runtimes.sdk.body import Body
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.server import Worker, events, serve, wait_first_item


class Toy(Worker):
    def __init__(self, settings):
        super().__init__(settings)
        self.seen = {"steps": 0, "cancelled": 0}

    def load(self):
        gate = self.settings.options.get("gate")
        while gate and not os.path.exists(gate):
            time.sleep(0.01)
        if self.settings.options.get("broken"):
            raise RuntimeError("CUDA out of memory")

    def routes(self):
        return {"POST /count": self.count, "GET /seen": self.what, "GET /path": self.path}

    def steps(self, number, delay, gate, fail_at, cancel):
        try:
            for step in range(number):
                if step == fail_at:
                    raise WorkerError("It failed on purpose.", code="on_purpose")
                time.sleep(delay)
                while gate and not os.path.exists(gate):
                    cancel.check()
                    time.sleep(0.01)
                cancel.check()
                self.seen["steps"] += 1
                yield {"step": step}
        finally:
            self.seen["cancelled"] += cancel.is_set

    async def count(self, request):
        body = await Body.parse(request)
        if body.flag("bug"):
            raise RuntimeError("a bug")
        number, delay = body.integer("number", 3, 0, 1000), body.number("delay", 0.0, 0, 10)
        gate, fail_at = body.text("gate", ""), body.integer("fail_at", -1, -1)
        steps = lambda cancel: self.steps(number, delay, gate, fail_at, cancel)
        if body.flag("stream"):
            return events(await wait_first_item(self.pool.stream(steps)))
        return JSONResponse(await self.pool.run(lambda cancel: list(steps(cancel))))

    async def what(self, _request):
        return JSONResponse({**self.seen, "running": self.pool.running, "waiting": self.pool.waiting})

    async def path(self, _request):
        return JSONResponse(
            {
                "path": sys.path,
                "modules": sorted(sys.modules),
                "env": dict(os.environ),
                "collects": gc.isenabled(),
                "loop": type(asyncio.get_running_loop()).__module__,
            }
        )


if __name__ == "__main__":
    serve(Toy)
