"""Checks that the installed uvicorn has the mostly private parts that `protocol`, `response_cycle` and the server subclass.

A tested version is accepted without a check. Another version is checked before it serves: most minor versions don't change these.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import uvicorn

from supervisor.errors import LlmuxError

TESTED: Final = "0.54"  # the newest minor version, with which all tests passed
USED: Final = {
    "HttpToolsProtocol": "_start_asgi_task _unset_keepalive_if_required access_log access_logger app asgi_version client "
    "connection_lost connection_made cycle data_received eof_received expect_100_continue flow headers logger loop on_body "
    "on_header on_headers_complete on_message_begin on_message_complete on_response_complete on_url parser pause_writing pipeline "
    "resume_writing scope server server_state tasks timeout_keep_alive timeout_keep_alive_handler "
    "timeout_keep_alive_task transport",
    "RequestResponseCycle": "body chunked_encoding default_headers disconnected expected_content_length flow keep_alive "
    "message_event more_body on_response receive response_complete response_started scope send transport "
    "waiting_for_100_continue",
    "FlowControl": "drain pause_reading pause_writing read_paused resume_reading resume_writing write_paused",
    "ServerState": "connections default_headers tasks total_requests",
    "Server": "capture_signals main_loop on_tick serve server_state should_exit shutdown startup",
}


class UnknownUvicornError(LlmuxError):
    """The installed uvicorn lacks an internal part that llmux uses."""

    code = "unknown_uvicorn"


def refuse_unknown_uvicorn() -> None:
    """Raises UnknownUvicornError, with the remedy, if uvicorn lacks such a part. Checks nothing for a tested version."""
    if not uvicorn.__version__.startswith(f"{TESTED}.") and (wrong := _find_missing_parts()):
        raise UnknownUvicornError(
            f"uvicorn {uvicorn.__version__} doesn't fit: {wrong}. This llmux was tested with {TESTED}. "
            f'Remedy: pip install "uvicorn=={TESTED}.*", or a newer llmux'
        )


def _find_missing_parts() -> str:
    async def app(_scope: object, _receive: object, _send: object) -> None: ...

    try:
        from uvicorn.protocols.http import flow_control, httptools_impl  # noqa: PLC0415
        from uvicorn.server import ServerState  # noqa: PLC0415

        import supervisor.server.protocol  # noqa: PLC0415, F401  # imports all used parts
        from supervisor.server.response_cycle import ResponseCycle  # noqa: PLC0415

        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            protocol = httptools_impl.HttpToolsProtocol(config, state := ServerState(), {}, loop)
        cycle, flow = ResponseCycle(protocol, keep_alive=True), flow_control.FlowControl(asyncio.Transport())
    except Exception as error:  # noqa: BLE001  # any of these may be missing or different
        return str(error)
    made = zip((protocol, cycle, flow, state, uvicorn.Server(config)), USED.items(), strict=True)
    lacking = [(kind, name) for each, (kind, names) in made for name in names.split() if not hasattr(each, name)]
    return ", ".join(f"{kind} has no {name}" for kind, name in lacking)
