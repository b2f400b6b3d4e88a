"""Constrains a model's output to a grammar: only tokens that continue it are allowed.

llguidance computes the allowed tokens in a process for each answer (grammar_server.py), so that a bad schema ends its own
answer and no other. It computes the next mask while the model computes. The server loads the model's tokenizer for the
first grammar: about a second for a large vocabulary.
"""

from __future__ import annotations

import copy
import json
import socket
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np
import torch
import transformers

from runtimes.sdk.chat.grammar import Grammar
from runtimes.sdk.errors import WorkerError, unsupported
from runtimes.transformers.worker.chat.model import Loaded

PROGRAM: Final = Path(__file__).with_name("grammar_server.py")
OK: Final = b"+"
TOO_EXPENSIVE: Final = "following it takes more time or memory than there is for one request"


class Guide:
    """One answer's way through a grammar."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def allowed(self) -> torch.Tensor:
        """A mask of the tokens that may come next, end tokens included.

        Call it once for each token. Raises WorkerError if no token is allowed, or the grammar has become too expensive.
        """
        try:
            reply = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise _format_error(TOO_EXPENSIVE) from None
        if reply[:1] != OK:
            raise _format_error(reply[1:].decode(errors="replace").partition("\n")[0])
        return torch.from_numpy(np.unpackbits(np.frombuffer(reply, np.uint8, offset=1), bitorder="little")).bool()

    def advance(self, token: int) -> None:
        """Report the chosen token. Raises WorkerError as `allowed` does."""
        try:
            self._connection.send_bytes(token.to_bytes(4, "little"))
        except OSError:
            raise _format_error(TOO_EXPENSIVE) from None

    def close(self) -> None:
        """End the fork. Further calls do nothing."""
        self._connection.close()


class Guides:
    """Makes guides for one model. Thread-safe."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self._lock = loaded, threading.Lock()
        self._server: _GrammarServer | None = None

    def guide(self, grammar: Grammar) -> Guide:
        """A guide for one answer. Raises WorkerError."""
        schemas = grammar.schemas
        ours, theirs = Pipe()
        try:
            with theirs, self._lock:
                self._start_server().take(theirs)
            ours.send_bytes(
                json.dumps({"schemas": [item.schema for item in schemas], "grammar": grammar.text}).encode()
            )
            reply = ours.recv_bytes()
        except (EOFError, OSError):
            ours.close()
            param = schemas[0].param if schemas else None
            message = f"{param or 'The grammar'}: {TOO_EXPENSIVE}. Make the schema smaller or simpler."
            raise WorkerError(message, code="schema_unusable", param=param) from None
        if reply[:1] == OK:
            return Guide(ours)
        ours.close()
        place, reason = json.loads(reply[1:])
        if place is None:
            raise WorkerError(f"This can't be made a grammar: {reason.partition(chr(10))[0]}", code="format_unusable")
        wrong = schemas[place]
        message = f"{wrong.param}: {wrong.purpose} can't be held to this schema: {reason}"
        raise WorkerError(message, code="schema_unusable", param=wrong.param)

    def mark(self, text: str) -> int | None:
        """The special token for this text; None: ordinary tokens write the text."""
        token = self._loaded.single_token(text)
        if token is None:
            return None
        with self._lock:
            return token if token in self._start_server().special else None

    def _start_server(self) -> _GrammarServer:
        if self._server is None or self._server.has_exited:
            self._server = _GrammarServer(self._loaded)
        return self._server


class _GrammarServer:
    """The grammar server's process. Raises WorkerError for a tokenizer that it can't load."""

    def __init__(self, loaded: Loaded) -> None:
        if not isinstance(loaded.tokenizer, transformers.PreTrainedTokenizerFast):
            raise unsupported("response_format", "this model's tokenizer can't be guided: it is none of the fast ones")
        tokenizer = copy.copy(loaded.tokenizer.backend_tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-I", str(PROGRAM)]
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        self._socket = ours
        with Connection(socket.dup(ours.fileno())) as connection:
            try:
                order = {"tokenizer": tokenizer.to_str(), "ends": sorted(loaded.ends)}
                connection.send_bytes(json.dumps(order).encode())
                reply = connection.recv_bytes()
            except (EOFError, OSError):
                reply = b"the program that follows grammars has ended; the worker's log says why"
        if reply[:1] != OK:
            ours.close()
            self._process.wait()
            reason = reply.removeprefix(b"-").decode()
            raise unsupported("response_format", f"this model's tokenizer can't be guided: {reason}")
        self.special: frozenset[int] = frozenset(json.loads(reply[1:]))

    @property
    def has_exited(self) -> bool:
        """Has the process exited?"""
        return self._process.poll() is not None

    def take(self, connection: Connection) -> None:
        """Let the process fork for this connection. Raises OSError."""
        socket.send_fds(self._socket, [OK], [connection.fileno()])


def _format_error(reason: str) -> WorkerError:
    return WorkerError(f"Nothing that the format allows can follow here ({reason}).", code="format_unusable")
