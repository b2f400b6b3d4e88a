"""Has documents and pictures of clients opened by a process of its own, see `convert_child`. What became of them is kept for a while.

An agent sends what it has read once again with each turn.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal

from supervisor.errors import InvalidRequestError, LlmuxError
from supervisor.io.convert_child import MISSING

Kind = Literal["pdf", "picture"]

LIMIT_S: Final = 30.0  # of one process
KEPT_BYTES: Final = 32 << 20
_CHILD: Final = Path(__file__).with_name("convert_child.py")
_NAMES: Final = {"pdf": "document", "picture": "image"}  # Claude Code goes on without what couldn't be processed


class Converter:
    """One process at a time. Use from one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._kept_bytes = 0

    async def convert(self, items: Sequence[tuple[Kind, bytes]]) -> list[bytes]:
        """A PDF's text, in UTF-8, and a picture as PNG. Raises InvalidRequestError for what can't be opened."""
        names = [sha256(kind.encode() + data).digest() for kind, data in items]
        new = {name: item for name, item in zip(names, items, strict=True) if name not in self._kept}
        found = {name: self._kept[name] for name in names if name in self._kept}
        if new:
            async with self._turn:
                found |= dict(zip(new, await _asked([*new.values()]), strict=True))
        for name in names:
            self._keep(name, found[name])
        return [found[name] for name in names]

    def _keep(self, name: bytes, data: bytes) -> None:
        if self._kept.pop(name, None) is None:
            self._kept_bytes += len(data)
        self._kept[name] = data
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1])


async def _asked(items: Sequence[tuple[Kind, bytes]]) -> list[bytes]:
    """Raises InvalidRequestError."""
    kind = _NAMES[items[0][0]]
    head = json.dumps([(kind, len(data)) for kind, data in items]).encode()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(_CHILD)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            out, _ = await process.communicate(b"".join((head, b"\n", *(data for _, data in items))))
    except TimeoutError as error:
        raise _refusal(kind, f"it takes more than {LIMIT_S:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    answered, _, rest = out.partition(b"\n")
    if not answered:
        raise _refusal(kind, "it takes too long, or too much memory")
    found, at = list[bytes](), 0
    for (name, _), (trouble, size) in zip(items, json.loads(answered), strict=True):
        if trouble is not None:
            raise _refusal(_NAMES[name], trouble)
        found.append(rest[at : at + size])
        at += size
    return found


def _refusal(kind: str, why: str) -> LlmuxError:
    if why == MISSING:
        why = "llmux lacks what opens it; its operator installs that with: pip install 'llmux-supervisor[media]'"
    return InvalidRequestError(f"Could not process {kind}: {why}.", code="invalid_media")
