"""Converts documents and pictures of clients in a separate process, see `convert_child`. Results are cached,
because an agent sends its documents again with each turn.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from supervisor.errors import InvalidRequestError
from supervisor.host.media import convert_child

Kind = Literal["pdf", "picture"]

LIMIT_S: Final = 30.0  # of one process
KEPT_BYTES: Final = 32 << 20
_CHILD: Final = Path(convert_child.__file__)
_EXTRA: Final = "media,heif"
_NAMES: Final = {"pdf": "document", "picture": "image"}  # words by which Claude Code recognises and drops failed media


@cache
def documents() -> tuple[str, ...]:
    """The media types of documents that can become text here. All but plain text need an extra."""
    return ("text/plain", "application/pdf") if find_spec("pypdf") else ("text/plain",)


class Converter:
    """Converts files, one process at a time. Use from one event loop."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Semaphore(1)
        self._results: OrderedDict[bytes, bytes | str] = OrderedDict()  # results, or errors, by digest of the input
        self._results_bytes = 0

    async def convert(self, kind: Kind, data: bytes) -> bytes:
        """A PDF's text, in UTF-8, or a picture as PNG. Raises InvalidRequestError for unreadable data."""
        name = sha256(kind.encode() + data).digest()
        found, is_sure = self._results.get(name), True
        if found is None:
            async with self._one_at_a_time:
                found, is_sure = await _run_child(kind, data)
        if is_sure:
            self._keep_result(name, found)
        if isinstance(found, str):
            raise InvalidRequestError(f"Could not process {_NAMES[kind]}: {found}.", code="invalid_media")
        return found

    def _keep_result(self, name: bytes, found: bytes | str) -> None:
        if self._results.pop(name, None) is None:
            self._results_bytes += len(found)
        self._results[name] = found
        while self._results_bytes > KEPT_BYTES:
            self._results_bytes -= len(self._results.popitem(last=False)[1])


async def _run_child(kind: Kind, data: bytes) -> tuple[bytes | str, bool]:
    """The result, or an error; and whether another attempt would give the same."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(_CHILD), kind),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            out, output = await process.communicate(data)
    except TimeoutError:
        return f"it takes more than {LIMIT_S:g} s", False
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    match process.returncode:
        case 0:
            return out, True
        case convert_child.REFUSED:
            return output.decode("utf-8", "replace"), True
        case convert_child.MISSING:
            remedy = f"its operator installs that with: pip install 'llmux-supervisor[{_EXTRA}]'"
            return f"llmux lacks what opens it; {remedy}", False
    return "it takes too long, or too much memory", False
