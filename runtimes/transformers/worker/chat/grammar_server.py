"""The program that follows grammars: it learns a model's tokens once, and forks for each grammar that it is handed.

A schema of a few lines can take for ever to be made a grammar, exhaust the stack or the memory, or have so many meanings
that a single step takes minutes. Nothing inside a process can stop llguidance at that, so it runs in one that can be lost:
each fork has a bounded stack and memory, so much of the processor's time to make its grammar and so much for all its steps,
and the kernel ends it when it takes more. Whoever request finds the connection closed.

Run by guide.py, with a socket as standard input. The first message is `{"tokenizer": …, "ends": […]}`, its answer the
tokens that are no text. Then sockets come, one for each grammar: `{"schemas": […], "grammar": …}`, answered by what is wrong
with it; after that, a mask of what may come next for each token (four bytes) that came. Ends with its standard input.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from multiprocessing.connection import Connection
from typing import Any, Final

from llguidance import (  # type: ignore[import-not-found]  # its stubs are in the worker's environment
    LLMatcher,
    LLParserLimits,
    LLTokenizer,
)

COMPILE_S: Final = 5.0
STEPS_S, STEP_S = 1.0, 0.01
"""Seconds of the processor's time: for steps that take long, in all; and what each step may take besides. An ordinary one
takes a thousandth."""
MEMORY: Final = 2 << 30
STACK: Final = 8 << 20
OK, FAILED = b"+", b"-"


def main() -> None:
    """Returns when its parent has gone."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # its parent still answers those who are being answered
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=0) as control:
        parent = Connection(os.dup(0))
        request = json.loads(parent.recv_bytes())
        try:
            tokens = LLTokenizer(request["tokenizer"], eos_token=request["ends"])
        except ValueError as error:
            parent.send_bytes(FAILED + str(error).encode())
            return
        special = [token for token in range(tokens.vocab_size) if tokens.is_special_token(token)]
        parent.send_bytes(OK + json.dumps(special).encode())
        parent.close()
        while received := socket.recv_fds(control, 1, 1)[1]:
            (descriptor,) = received
            if os.fork() == 0:
                control.close()
                _run_fork(Connection(descriptor), tokens)
            os.close(descriptor)


def _run_fork(client: Connection, tokens: Any) -> None:
    """In the fork. Returns never."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_STACK, STACK)):
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        _serve(client, tokens)
    except (EOFError, OSError):
        pass  # nobody asks any more
    finally:
        os._exit(0)


def _serve(client: Connection, tokens: Any) -> None:
    wanted = json.loads(client.recv_bytes())
    signal.setitimer(signal.ITIMER_PROF, COMPILE_S)  # counts the processor's time; its signal ends the process
    for place, schema in enumerate(wanted["schemas"]):
        wrong, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(schema))
        if wrong:
            client.send_bytes(FAILED + json.dumps([place, messages[0]]).encode())
            return
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(wanted["grammar"]), log_level=0, limits=limits)
    if matcher.is_error():
        client.send_bytes(FAILED + json.dumps([None, matcher.get_error()]).encode())
        return
    client.send_bytes(OK)
    left = STEPS_S
    while True:
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, left + STEP_S)
        mask = matcher.compute_bitmask()
        left -= max(0.0, time.process_time() - began - STEP_S)
        client.send_bytes(FAILED + matcher.get_error().encode() if matcher.is_error() else OK + mask)
        signal.setitimer(signal.ITIMER_PROF, 0)
        matcher.consume_token(int.from_bytes(client.recv_bytes(), "little"))


if __name__ == "__main__":
    main()
