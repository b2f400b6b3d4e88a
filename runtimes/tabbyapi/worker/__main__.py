"""Starts TabbyAPI with the worker's key. TabbyAPI reads keys from `api_tokens.yml` in its folder, or else invents some.

So it runs in a separate folder with links to everything in the checkout, except a configuration and keys there. The file
with the key is in memory only.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import secrets
import sys
from pathlib import Path
from typing import Final

from runtimes.sdk.launching import check_port, hide, option, take_key
from runtimes.sdk.own_folder import OwnFolder

KEYS_FILE: Final = "api_tokens.yml"
NOT_OURS: Final = (KEYS_FILE, "config.yml")


def main() -> None:
    """Arguments: the checkout, then those of its `main.py`."""
    checkout, words = Path(sys.argv[1]), sys.argv[2:]
    check_port(option("--host"), int(option("--port")))
    keys = os.memfd_create(KEYS_FILE)
    key, admin_key = take_key(), secrets.token_hex(32)
    hide(admin_key)
    os.write(keys, json.dumps({"api_key": key, "admin_key": admin_key}).encode())  # JSON is YAML, too
    with contextlib.closing(OwnFolder("llmux-tabbyapi-")) as own:
        for entry in checkout.iterdir():
            if entry.name not in NOT_OURS:
                (own.path / entry.name).symlink_to(entry)
        (own.path / KEYS_FILE).symlink_to(f"/proc/self/fd/{keys}")
        os.chdir(own.path)
        gc.enable()  # `bootstrap` disabled it
        sys.path.insert(0, str(checkout))
        sys.argv = ["main.py", *words]
        runpy.run_path(str(checkout / "main.py"), run_name="__main__")


if __name__ == "__main__":
    main()
