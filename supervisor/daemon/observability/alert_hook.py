"""Sends alerts to the operator's webhook and command (`server.alerts`), one after the other, off the engine's turn.

The same alert is sent at most once a minute. A failed delivery is retried twice; then it is logged and given up.
The command runs below a shim, as workers do: it has ten seconds, and ends with the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from supervisor.catalog.sections.sections import AlertsConfig
from supervisor.core.effects import Alert
from supervisor.errors import InvalidRequestError, LlmuxError, UnavailableError
from supervisor.fleet.local import inherited
from supervisor.host.process.spawn import SpawnOrder, spawn
from supervisor.schema.daemon import AlertDelivery

log = structlog.get_logger("llmux.alerts")

LIMIT_S: Final = 10.0
AGAIN_S: Final = 60.0
PAUSES_S: Final = (1.0, 5.0)
MOST_WAITING: Final = 100
TEST: Final = Alert(code="alert.test", message="An operator tries whether alerts arrive.")
LOG_NAME: Final = "(alerts).log"
_LOG_BYTES: Final = 1 << 20


class AlertMessage(msgspec.Struct):
    """One alert, as the webhook and the command get it. `at`: Unix seconds; `host`: this machine's name."""

    at: float
    code: str
    message: str
    device: str | None
    model: str | None
    host: str


class AlertHook:
    """One for each daemon. Use from the event loop's thread."""

    def __init__(self, config: Callable[[], AlertsConfig | None], instance: str, log_dir: Path) -> None:
        self._config = config
        self._instance = instance
        self._log = log_dir / LOG_NAME
        self._waiting: asyncio.Queue[AlertMessage] = asyncio.Queue(MOST_WAITING)
        self._sent: dict[tuple[str, str | None, str | None], float] = {}
        self._count = 0

    def add(self, alert: Alert) -> None:
        """Queue an alert for sending. It is dropped if too many wait; the log has it anyway."""
        if self._config() is None:
            return
        now, about = time.monotonic(), (alert.code, alert.device, alert.model)
        if now - self._sent.get(about, -AGAIN_S) < AGAIN_S:
            return
        self._sent = {key: at for key, at in self._sent.items() if now - at < AGAIN_S} | {about: now}
        with contextlib.suppress(asyncio.QueueFull):
            self._waiting.put_nowait(_message(alert))

    async def run(self) -> None:
        """Send the queued alerts, until cancelled."""
        while True:
            message = await self._waiting.get()
            config = self._config()
            for way in (self._post, self._run):
                for pause_s in (*PAUSES_S, None):
                    try:
                        if config is not None:
                            await way(config, message)
                        break
                    except (LlmuxError, OSError) as error:
                        if pause_s is None:
                            log.warning("alert.not_sent", code=message.code, reason=str(error))
                            break
                        await asyncio.sleep(pause_s)

    async def test(self) -> AlertDelivery:
        """Send a test alert now. Raises InvalidRequestError if no webhook or command is configured."""
        config = self._config()
        if config is None or (config.webhook is None and not config.command):
            raise InvalidRequestError(
                "No way for alerts is configured: set server.alerts.webhook or server.alerts.command."
            )
        found: list[str | None] = []
        for way in (self._post, self._run):
            try:
                await way(config, _message(TEST))
                found.append(None)
            except (LlmuxError, OSError) as error:
                found.append(str(error))
        return AlertDelivery(*found)

    async def _post(self, config: AlertsConfig, message: AlertMessage) -> None:
        """Send the alert to the webhook. Raises UnavailableError."""
        if config.webhook is None:
            return
        import httpx  # noqa: PLC0415  # 0.1 s and 3 MiB, only with a webhook

        try:
            async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
                answer = await client.post(
                    config.webhook, content=msgspec.json.encode(message), headers={"content-type": "application/json"}
                )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnavailableError(f"webhook: {error or type(error).__name__}") from error
        if not answer.is_success:
            raise UnavailableError(f"webhook: it answered {answer.status_code}")

    async def _run(self, config: AlertsConfig, message: AlertMessage) -> None:
        """Run the command with the alert. Raises UnavailableError, or SpawnError if it can't be started."""
        if not config.command:
            return
        self._count += 1
        parts = {"CODE": message.code, "MESSAGE": message.message, "DEVICE": message.device, "MODEL": message.model}
        env = {f"LLMUX_ALERT_{name}": value or "" for name, value in parts.items()}
        env["LLMUX_ALERT"] = json.dumps(msgspec.to_builtins(message))
        order = SpawnOrder(
            instance=self._instance,
            model="(alerts)",
            generation=self._count,
            argv=tuple(config.command),
            env={**inherited(), **env},
            log=self._log,
            log_limit=_LOG_BYTES,
        )
        process = await spawn(order)
        try:
            if not await process.ends_within(LIMIT_S):
                raise UnavailableError(f"command: it took longer than {LIMIT_S:.0f} s, and was ended")
            end = await process.wait()
        finally:
            process.kill()
        if end.code:
            raise UnavailableError(f"command: it ended with {end.code}; its output is in {self._log}")


def _message(alert: Alert) -> AlertMessage:
    return AlertMessage(
        round(time.time(), 3), alert.code, alert.message, alert.device, alert.model, socket.gethostname()
    )
