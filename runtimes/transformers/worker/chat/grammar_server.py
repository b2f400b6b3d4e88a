"""The grammar server: a program that loads a model's tokenizer once, and forks for each grammar.

A schema of a few lines can compile for ever, exhaust the stack or the memory, or be so ambiguous that a single step takes
minutes. llguidance can't be interrupted, so it runs in a process that may be killed: each fork has limits for stack, memory,
CPU time to compile its grammar and CPU time for all its steps, and the kernel kills it beyond them. The client finds its
connection closed.

guide.py runs it with a socket as standard input. The first message is `{"tokenizer": …, "ends": […]}`; the reply lists the
special tokens. Then it receives one socket for each grammar. On that socket the client sends `{"schemas": […], "grammar": …}`
and gets an error or `OK`, then a mask of the allowed next tokens after each token (four bytes) that it sends. The server
exits at the end of its standard input.
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
"""CPU seconds: for slow steps in total, and in addition for each step. An ordinary step takes a thousandth."""
MEMORY: Final = 2 << 30
STACK: Final = 8 << 20
OK, FAILED = b"+", b"-"


def main() -> None:
    """Serve until the parent exits."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the parent finishes running requests first
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
    """Runs in the fork. Never returns."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_STACK, STACK)):
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        _serve_grammar(client, tokens)
    except (EOFError, OSError):
        pass  # the client closed its connection
    finally:
        os._exit(0)


def _serve_grammar(client: Connection, tokens: Any) -> None:
    wanted = json.loads(client.recv_bytes())
    signal.setitimer(signal.ITIMER_PROF, COMPILE_S)  # counts CPU time; its signal kills the process
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
