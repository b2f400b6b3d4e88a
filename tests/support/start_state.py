"""What a program finds when it starts, as JSON on stdout: run by an exec, and by the forker. Run as `python -m`.

What must differ from one start to the next is under `drawn`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import os
import random
import resource
import secrets
import signal
import sys
import threading
import time
import types
import uuid
import warnings
from pathlib import Path

from supervisor.server.request_id import request_id_of
from tests.support import forker


def process() -> dict[str, object]:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = ("Umask", "Threads", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs")
    return {name: status[name] for name in names} | {
        "cwd": os.getcwd(),
        "descriptors": {number: os.readlink(f"/proc/self/fd/{number}") for number in sorted(forker.descriptors())},
        "environ": dict(os.environ),
        "leads": (os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()),
        "limits": [resource.getrlimit(number) for number in forker.LIMITS],
        "nice": os.nice(0),
    }


def interpreter() -> dict[str, object]:
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return {
        "argv": sys.argv,
        "collector": (gc.isenabled(), gc.get_threshold()),
        "flags": str(sys.flags),
        "hooks": [str(hook) for hook in (sys.excepthook, threading.excepthook, sys.unraisablehook)],
        "logging": [str(logging.root), str(logging.root.handlers), logging.root.manager.disable],
        "loop": str(asyncio._get_running_loop()),
        "main": sys.modules["__main__"].__spec__.name,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "streams": [(stream.encoding, stream.errors, stream.line_buffering) for stream in streams],
        "threads": [thread.name for thread in threading.enumerate()],
        "timezone": time.tzname,
        "warnings": [str(each) for each in warnings.filters],
    }


def modules() -> dict[str, object]:
    """Counters, limits and what is remembered, in every module of ours."""
    found: dict[str, object] = {}
    ours = [name for name in sys.modules if name.startswith(("supervisor.", "runtimes."))]
    for module, name in ((module, name) for module in ours for name in vars(sys.modules[module])):
        value = vars(sys.modules[module])[name]
        if isinstance(value, (int, float, str, itertools.count)):
            found[f"{module}.{name}"] = str(value)
        elif isinstance(value, (dict, list, set, bytearray)):
            found[f"{module}.{name}"] = len(value)
        elif hasattr(value, "cache_info"):
            found[f"{module}.{name}"] = value.cache_info()
        elif isinstance(value, type):
            owned = (each for each in vars(value).items() if isinstance(each[1], itertools.count))
            found |= {f"{module}.{name}.{attribute}": str(count) for attribute, count in owned}
    return found


def drawn() -> dict[str, object]:
    sources = {
        f"{module.__name__}.{name}": value.getrandbits(96)
        for module in list(sys.modules.values())
        if isinstance(module, types.ModuleType)
        for name, value in list(vars(module).items())
        if isinstance(value, random.Random)
    }
    ids = {"request": request_id_of(None).decode(), "uuid": str(uuid.uuid4()), "secret": secrets.token_hex(12)}
    return {**sources, **ids, "random": random.random(), "pid": os.getpid()}


if __name__ == "__main__":
    forker.import_all()
    print(json.dumps({"same": process() | interpreter() | modules(), "drawn": drawn()}), flush=True)
    if "--and-wait" in sys.argv:
        signal.pause()
