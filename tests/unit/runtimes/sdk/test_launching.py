"""Starting another project's server within its own interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

SERVER = """
import logging, os, sys
from runtimes.sdk import launching
key = launching.take_key()
launching.hide("another")
logging.basicConfig(stream=sys.stdout, level="INFO")
logging.info("server_args=ServerArgs(api_key=%r)", key)
print("Your keys are:", key, "another", file=sys.stderr)
sys.stderr.writelines(["again: ", key])
assert key == "secret" and "LLMUX_WORKER_KEY" not in os.environ and sys.stdout.fileno() == 1
"""


def test_servers_that_log_their_key():
    done = subprocess.run(
        [sys.executable, "-c", SERVER],
        env={**os.environ, "LLMUX_WORKER_KEY": "secret"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "INFO:root:server_args=ServerArgs(api_key='***')\n"
    assert done.stderr == "Your keys are: *** ***\nagain: ***"
