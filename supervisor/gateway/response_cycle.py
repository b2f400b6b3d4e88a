"""A request in the gateway's stages: the values that a stage passes to the next ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from supervisor.gateway.body.body import Body
from supervisor.gateway.disconnect import CancelOnDisconnect, Receive, Scope, Send
from supervisor.gateway.head import RequestHead, head_of
from supervisor.host.store.request_buffer import RequestBuffer

if TYPE_CHECKING:
    from supervisor.catalog.sections.clients import ClientConfig
    from supervisor.gateway.filters.body_log import Capture
    from supervisor.gateway.filters.stored_conversation import StoredConversation
    from supervisor.gateway.keepalive import Keepalive
    from supervisor.gateway.media.media_loading import Loading
    from supervisor.gateway.request import Request
    from supervisor.gateway.route.ladder import Ladder
    from supervisor.gateway.route.mending import Mending


class ResponseCycle:
    """One for each request. It ends with the last stage, unlike the `Request`, which is shown and recorded."""

    __slots__ = (
        "body",
        "capture",
        "client",
        "head",
        "is_permitted",
        "keepalive",
        "ladder",
        "loading",
        "mending",
        "profile",
        "receive",
        "request",
        "request_buffer",
        "scope",
        "send",
        "stored_conversation",
        "wants_load_status",
    )

    body: Body  # parsed; from the stage `body` on, until the request waits for a worker
    profile: ClientConfig  # of the client; from the stage `identity` on
    client: CancelOnDisconnect  # watches the client; set once the request is in flight

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, request: Request, request_buffer: RequestBuffer
    ) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.request = request
        self.head: RequestHead = head_of(scope)
        self.request_buffer = request_buffer  # the client's body, later the worker's body
        self.stored_conversation: StoredConversation | None = None  # set iff the answer is kept or changed
        self.capture: Capture | None = None  # set iff a copy of both bodies is kept
        self.ladder: Ladder | None = None  # set iff the request names a task: selects the next candidate
        self.is_permitted = False  # does the body allow the request to leave this machine?
        self.loading: Loading | None = None  # loads the media that the body refers to; set iff there may be some
        self.mending: Mending | None = None  # set iff the worker has refused the request
        self.wants_load_status: bool | None = None  # status lines in the stream while a model loads; None: not set
        self.keepalive: Keepalive | None = None  # set iff the client waits for a stream

    @property
    def is_begun(self) -> bool:
        """Does the client have the head of a stream before any worker has answered?"""
        return self.keepalive is not None and self.keepalive.started

    def release(self) -> None:
        """Release all buffers of the request."""
        self.request_buffer.release()
        if self.loading is not None:
            self.loading.buffer.release()
        if self.stored_conversation is not None:
            self.stored_conversation.release()
        attempt = self.request.attempt
        if self.ladder is not None:  # else it is `request_buffer`, which may have another owner now
            attempt.body.release()
        # Break reference cycles:
        attempt.translation = self.ladder = None


Stage = Callable[[ResponseCycle], Awaitable[None]]
"""One step of the pipeline. A stage ends the request by raising LlmuxError."""

Stages = Sequence[Stage]
