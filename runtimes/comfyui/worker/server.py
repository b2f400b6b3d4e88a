"""A client of ComfyUI's own server: queues a workflow, follows its progress, fetches its pictures.

The API follows ComfyUI's server.py and execution.py. `/prompt` takes a workflow and answers at once. A websocket reports
progress and the sampler's previews. `/history/{id}` names the pictures, and `/view` returns them.
"""

from __future__ import annotations

import http.client
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlencode

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from runtimes.sdk.child import HOST, Child
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.worker_pool import Cancel, CancelledWorkError

POLL_S: Final = 0.1
LARGEST: Final = 1 << 28  # of a message: previews are pictures
HEAD: Final = 8  # bytes of a binary message before the picture: two numbers, of the message's kind and the picture's
PREVIEWS: Final = {b"\0\0\0\1\0\0\0\1": "jpeg", b"\0\0\0\1\0\0\0\2": "png"}

OnStep = Callable[[int, int], None]
"""Called after each step with the number of steps done and the total."""
OnPreview = Callable[[bytes, str], None]
"""Called with a preview after the last reported step: a picture and its format."""


class Comfy:
    """A client of the server in this child process."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def nodes(self) -> Mapping[str, Any]:
        """Node class → the inputs of such a node."""
        found: Mapping[str, Any] = self._request_json("GET", "/object_info")
        return found

    def upload(self, name: str, picture: bytes) -> str:
        """Upload this picture. Returns the name by which a workflow loads it."""
        boundary = secrets.token_hex(16)
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n'
        body = head.encode() + b"Content-Type: application/octet-stream\r\n\r\n" + picture
        body += f"\r\n--{boundary}--\r\n".encode()
        found = self._request_json("POST", "/upload/image", body, f"multipart/form-data; boundary={boundary}")
        return "/".join(filter(None, (found.get("subfolder"), found["name"])))

    def run(
        self,
        workflow: Mapping[str, Any],
        loaders: Mapping[str, str],
        cancel: Cancel,
        on_step: OnStep,
        on_preview: OnPreview,
    ) -> list[Mapping[str, str]]:
        """Run a workflow. Returns the places of its pictures; temporary ones only if there are no others. Blocks.

        `loaders`: node that loads a picture of the client → the request's field with that picture.
        Raises WorkerError for a workflow that ComfyUI refuses or fails to run. Raises CancelledWorkError, also when `on_step` or
        `on_preview` raises it, after taking the workflow out of the queue.
        """
        client, number = secrets.token_hex(16), secrets.token_hex(16)
        try:
            with connect(
                f"ws://{HOST}:{self._child.port}/ws?clientId={client}", max_size=LARGEST, proxy=None
            ) as socket:
                self._enqueue(workflow, client, number)
                try:
                    while not self._is_done(socket, number, loaders, on_step, on_preview):
                        cancel.check()
                except CancelledWorkError:
                    self._cancel_workflow(number)
                    raise
        except (ConnectionClosed, OSError) as error:
            raise _comfy_error(f"its connection broke: {error}") from error
        outputs = self._request_json("GET", f"/history/{number}").get(number, {}).get("outputs", {})
        self._post("/history", {"delete": [number]})
        found = [picture for output in outputs.values() for picture in output.get("images", ())]
        return [picture for picture in found if picture["type"] == "output"] or found

    def picture(self, place: Mapping[str, str], converted: str | None) -> bytes:
        """One picture; `converted` is a format and its quality, as jpeg;90."""
        query = {key: place[key] for key in ("filename", "subfolder", "type")}
        path = f"/view?{urlencode({**query, 'preview': converted} if converted else query)}"
        status, body = self._child.request("GET", path)
        if status != http.client.OK:
            raise _comfy_error(f"it doesn't give {place['filename']} ({status})")
        return body

    def _enqueue(self, workflow: Mapping[str, Any], client: str, number: str) -> None:
        order = {"prompt": workflow, "client_id": client, "prompt_id": number}
        status, body = self._child.request("POST", "/prompt", json.dumps(order).encode(), "application/json")
        if status != http.client.OK:
            raise WorkerError(_refusal_reasons(body), code="invalid_request")

    def _is_done(
        self, socket: Any, number: str, loaders: Mapping[str, str], on_step: OnStep, on_preview: OnPreview
    ) -> bool:
        """Handle the next message, if one comes in time. True once the workflow is done. Raises WorkerError for its failure."""
        try:
            message = socket.recv(timeout=POLL_S)
        except TimeoutError:
            return False
        if isinstance(message, bytes):
            if (kind := PREVIEWS.get(message[:HEAD])) is not None:
                on_preview(message[HEAD:], kind)
            return False
        event = json.loads(message)
        kind, data = event.get("type"), event.get("data") or {}
        if data.get("prompt_id") != number:
            return False
        if kind == "progress":
            on_step(int(data["value"]), int(data["max"]))
        elif kind == "execution_error":
            why = f"{data.get('node_type')}: {data.get('exception_message')}"
            if (field := loaders.get(str(data.get("node_id")))) is not None:
                raise WorkerError(f"{field} can't be loaded: {_shorten(why)}.", param=field, code="invalid_image")
            raise _comfy_error(why)
        elif kind == "execution_interrupted":
            raise _comfy_error("somebody has interrupted it")
        return kind == "executing" and data.get("node") is None  # `execution_success` comes before the history has it

    def _cancel_workflow(self, number: str) -> None:
        self._post("/queue", {"delete": [number]})
        self._post("/interrupt", {"prompt_id": number})  # where it runs; this is the only one

    def _post(self, path: str, fields: Mapping[str, object]) -> None:
        self._child.request("POST", path, json.dumps(fields).encode(), "application/json")

    def _request_json(self, method: str, path: str, body: bytes = b"", kind: str = "") -> Any:
        try:
            status, answer = self._child.request(method, path, body, kind)
            if status == http.client.OK:
                return json.loads(answer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _comfy_error(str(error)) from error
        raise _comfy_error(f"{path} is answered with {status}")


def _comfy_error(why: str) -> WorkerError:
    return WorkerError(f"ComfyUI failed: {_shorten(why)}.", code="worker_failed", status=500)


def _shorten(text: str) -> str:
    return " ".join(text.split())[:500]


def _refusal_reasons(body: bytes) -> str:
    """ComfyUI's reasons for refusing a workflow, for people."""
    try:
        found = json.loads(body)
        errors = [
            f"{node['class_type']}: {error['message']}: {error['details']}"
            for node in found["node_errors"].values()
            for error in node["errors"]
        ]
        reason = "; ".join(errors) or found["error"]["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        reason = body.decode(errors="replace")
    return f"ComfyUI refuses the workflow: {reason[:500]}"
