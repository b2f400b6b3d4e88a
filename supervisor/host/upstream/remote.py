"""The client to remote models, over httpx's transport.

Not over `httpx.Client`, which keeps cookies, adds headers, follows redirects and reads proxies from the environment. Only
listed header fields are forwarded: nothing of a client's identity reaches the remote, and none of the remote's cookies or
policies reaches a client. Importing this module imports httpx (0.1 s): only a daemon that has a remote model does.

A request is repeated only before its answer begins: if no connection was made, or if the remote answers 429 or 503 and the
wait is within bounds. After the request was sent, a broken connection is never retried, because the remote may have done
(and charged) the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Coroutine
from typing import Final, cast

import httpx
import structlog

from runtimes.base import RemoteSpec
from supervisor.errors import LlmuxError, UnreachableError, UpstreamError, UpstreamTimeoutError
from supervisor.host.store.request_buffer import RequestBuffer
from supervisor.host.upstream.probe import OUR_OWN_TROUBLE, ProbeResult, causes, result_of
from supervisor.host.upstream.upstream import Body, Headers, UpstreamResponse

log = structlog.get_logger("llmux.remote")

FIRST_PAUSE_S: Final = 0.5  # before the first retry, without a Retry-After; doubles
PROBE_TIMEOUT_S: Final = 10.0
IDLE_S: Final = 4.0  # shorter than servers allow, so that no server closes a connection while we send
MASK: Final = b"***"

_REQUEST_FIELDS: Final = frozenset(
    (b"content-type", b"accept", b"idempotency-key", b"openai-beta", b"anthropic-version", b"anthropic-beta")
)
_ANSWER_FIELDS: Final = frozenset(
    (
        b"content-type",
        b"content-length",
        b"content-encoding",
        b"content-disposition",
        b"content-language",
        b"cache-control",
        b"retry-after",
    )
)
_ANSWER_PREFIXES: Final = (b"anthropic-ratelimit-", b"x-ratelimit-")
_BUSY: Final = (429, 503)
_KEY_REFUSED: Final = (401, 407)


class RemotePool:
    """Connections to one remote. Use from one event loop; `close` the pool when its model is removed.

    The constructor reads certificates: call it in a thread.
    """

    def __init__(
        self, spec: RemoteSpec, loop: asyncio.AbstractEventLoop, *, first_byte_s: float, idle_s: float
    ) -> None:
        """`first_byte_s` and `idle_s` (the longest silence within an answer) are the defaults for those of `spec`."""
        self.loop = loop
        self.spec = spec
        self.open_responses = 0
        self._first_byte_s = spec.first_byte_s if spec.first_byte_s is not None else first_byte_s
        self._stream_idle_s = spec.stream_idle_s if spec.stream_idle_s is not None else idle_s
        self._base = httpx.URL(spec.base_url)
        self._secret = spec.key.encode("ascii") if spec.key is not None else None
        self.name = f"{self._base.host}:{self._base.port}" if self._base.port else self._base.host
        self._own_fields: Headers = [(b"user-agent", b"llmux"), (b"accept-encoding", b"identity")]
        if self._secret is not None:
            self._own_fields.append((b"authorization", b"Bearer " + self._secret))
        self._transport = httpx.AsyncHTTPTransport(
            verify=ssl.create_default_context(cafile=spec.ca_file),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16, keepalive_expiry=IDLE_S),
        )
        self._closing: set[asyncio.Task[None]] = set()

    async def request(
        self, method: str, target: bytes, headers: Headers, body: Body = b"", *, first_byte_s: float | None = None
    ) -> RemoteResponse:
        """See `Upstream`; `target` is the public path.

        Drops the client's query, which may hold credentials, and `first_byte_s`, which is for workers.
        Raises UpstreamError, with code `upstream_auth_failed` if the remote refuses our key, and UpstreamTimeoutError.
        """
        fields = [item for item in headers if item[0] in _REQUEST_FIELDS] + self._own_fields
        path = target.partition(b"?")[0].removeprefix(b"/v1")
        if isinstance(body, bytes | bytearray):
            body = RequestBuffer(data=body)
        attempts = self.spec.max_retries if isinstance(body, RequestBuffer) else 0
        if isinstance(body, RequestBuffer) and (body.size or method == "POST"):
            fields.append((b"content-length", b"%d" % body.size))
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                response = await self._send(method, path, fields, body)
            except UnreachableError as error:
                if attempts == 0:
                    raise UpstreamError(
                        error.message
                    ) from error  # UnreachableError would send the request to another worker
                wait_s, why = min(pause_s, self.spec.retry_wait_s), error.message
            else:
                wait_s = _retry_after_s(response.headers, pause_s)
                if response.status not in _BUSY or attempts == 0 or wait_s > self.spec.retry_wait_s:
                    if isinstance(body, RequestBuffer):
                        body.sent()
                    return self._check_status(response)
                why = f"HTTP {response.status}"
                response.close()
            attempts -= 1
            pause_s *= 2
            log.info("remote.retried", remote=self.name, reason=why, wait_s=round(wait_s, 3))
            await asyncio.sleep(wait_s)

    async def probe(self) -> ProbeResult:
        """Request the list of models. Never raises for network errors; `detail` holds no secret."""
        label = f"{self.name} answers GET {self._base.path.rstrip('/')}/models with "
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                probe = await result_of(
                    await self._send("GET", b"/models", list(self._own_fields), RequestBuffer()), label
                )
        except TimeoutError:
            return ProbeResult(False, None, f"{self.name} did not answer in {PROBE_TIMEOUT_S:g} s")
        except LlmuxError as error:
            ours = any(getattr(cause, "errno", None) in OUR_OWN_TROUBLE for cause in causes(error))
            return ProbeResult(False, None, error.message, inconclusive=ours)
        return (
            ProbeResult(False, probe.status, self._key_refused_error().message)
            if probe.status in _KEY_REFUSED
            else probe
        )

    async def close(self) -> None:
        """Close all connections; this breaks off current answers."""
        await self._transport.aclose()
        await asyncio.gather(*self._closing, return_exceptions=True)

    # called by responses

    def mask_key(self, data: bytes) -> bytes:
        """Mask our key in `data`: the remote may repeat it."""
        return data.replace(self._secret, MASK) if self._secret is not None else data

    def release(self, end: Coroutine[None, None, None]) -> None:
        """Reuse the connection of an ended answer, or close it if the answer is incomplete."""
        self.open_responses -= 1
        task = self.loop.create_task(end)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _send(
        self, method: str, path: bytes, fields: Headers, body: RequestBuffer | AsyncIterator[bytes]
    ) -> RemoteResponse:
        url = self._base.copy_with(raw_path=self._base.raw_path.rstrip(b"/") + path)
        timeouts = {"connect": self.spec.connect_s, "read": None, "write": None, "pool": None}
        content: bytes | AsyncIterable[bytes] = b""
        if not isinstance(body, RequestBuffer):
            content = body
        elif body.size:
            content = cast("AsyncIterable[bytes]", body.pieces())  # httpx accepts any buffer
        request = httpx.Request(method, url, headers=fields, content=content, extensions={"timeout": timeouts})
        try:
            async with asyncio.timeout(self.spec.connect_s + self._first_byte_s):
                response = await self._transport.handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self._connect_error(error) from error
        except httpx.TransportError as error:
            raise UpstreamError(f"The remote {self.name} ended the connection without an answer.") from error
        except TimeoutError as error:
            raise UpstreamTimeoutError(
                f"The remote {self.name} was silent for {self._first_byte_s:g} s before its answer began."
            ) from error
        self.open_responses += 1
        return RemoteResponse(self, response, self._stream_idle_s)

    def _check_status(self, response: RemoteResponse) -> RemoteResponse:
        if response.status in _KEY_REFUSED:
            response.close()
            error = self._key_refused_error()
            log.warning("remote.key_refused", remote=self.name, variable=self.spec.key_env, status=response.status)
            raise error
        if 300 <= response.status < 400:
            response.close()
            raise UpstreamError(
                f"The remote {self.name} sends requests on to another address (HTTP {response.status}); "
                "redirects are not followed: set the model's base_url to that address."
            )
        return response

    def _key_refused_error(self) -> UpstreamError:
        variable = self.spec.key_env
        advice = (
            f"check the environment variable {variable} of the llmux daemon, and restart it"
            if variable is not None
            else "name the environment variable that holds one in the model's api_key_env"
        )
        return UpstreamError(
            f"The remote {self.name} refuses the key that llmux has for it, not yours: {advice}.",
            code="upstream_auth_failed",
        )

    def _connect_error(self, error: httpx.TransportError) -> LlmuxError:
        if isinstance(error, httpx.ConnectTimeout):
            return UnreachableError(
                f"The remote {self.name} did not accept a connection within {self.spec.connect_s:g} s."
            )
        trouble: object = error
        for cause in causes(error):
            if isinstance(cause, ssl.SSLCertVerificationError):
                why = cause.verify_message or "its certificate can't be verified"
                return UpstreamError(
                    f"The remote {self.name} does not prove who it is ({why}); "
                    "a certificate of a company's own needs the model's ca_file.",
                    code="upstream_certificate",
                )
            if trouble is error and isinstance(cause, OSError) and cause.strerror:
                trouble = cause.strerror
        return UnreachableError(f"The remote {self.name} can't be reached ({trouble}).")


class RemoteResponse(UpstreamResponse):
    """A remote's `UpstreamResponse`. One consumer."""

    __slots__ = ("_body", "_idle_s", "_open", "_pool", "_stream", "complete", "headers", "status")

    def __init__(self, pool: RemotePool, response: httpx.Response, idle_s: float) -> None:
        self.status = response.status_code
        self.headers: Headers = [
            (lower, value)
            for name, value in response.headers.raw
            if (lower := name.lower()) in _ANSWER_FIELDS or lower.startswith(_ANSWER_PREFIXES)
        ]
        if self.status >= 400:  # masking may change the body: see `read`
            self.headers = [item for item in self.headers if item[0] != b"content-length"]
        self.complete = False
        self._pool = pool
        self._open = True
        self._stream = cast("httpx.AsyncByteStream", response.stream)
        self._body = cast("AsyncGenerator[bytes, None]", aiter(self._stream))
        self._idle_s = idle_s

    @property
    def drained(self) -> bool:
        return self.complete

    async def next_chunk(self) -> bytes:
        """The next piece as it came; see `UpstreamResponse`."""
        try:
            while not self.complete:
                async with asyncio.timeout(self._idle_s):
                    chunk = await anext(self._body, b"")
                if chunk:
                    return chunk
                self.complete = True
        except httpx.HTTPError as error:
            raise UpstreamError(
                f"The remote {self._pool.name} broke off in the middle of its answer.", code="upstream_broken"
            ) from error
        except TimeoutError as error:
            raise UpstreamTimeoutError(
                f"The remote {self._pool.name} was silent for {self._idle_s:g} s in the middle of its answer."
            ) from error
        return b""

    async def read(self, limit: int) -> bytes:
        """See `UpstreamResponse`; our key is masked."""
        return self._pool.mask_key(await super().read(limit))

    def close(self) -> None:
        if self._open:
            self._open = False
            self._pool.release(self._close_stream())

    async def _close_stream(self) -> None:
        with contextlib.suppress(httpx.HTTPError):  # the response is discarded
            await self._body.aclose()
            await self._stream.aclose()


def _retry_after_s(headers: Headers, otherwise_s: float) -> float:
    """The seconds to wait by Retry-After (seconds or a date); `otherwise_s` if it isn't readable."""
    text = next((value.decode("latin-1").strip() for name, value in headers if name == b"retry-after"), "")
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return otherwise_s
