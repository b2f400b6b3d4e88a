"""Starts SGLang's server with its key, which `sglang.launch_server` takes as an argument only."""

from __future__ import annotations

import sys

from runtimes.sdk.launching import check_port, option, run, take_key

if __name__ == "__main__":
    check_port(option("--host"), int(option("--port")))
    run("sglang.launch_server", [*sys.argv[1:], "--api-key", take_key()])
