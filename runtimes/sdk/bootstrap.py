"""Run a worker program so that it can import its own environment and this package, but none of the supervisor's packages.

    <venv>/bin/python -I bootstrap.py runtimes.<runtime>.worker '{"model": …, "host": …, "port": …}'

The folder above `runtimes` may be the supervisor's site-packages, so it must not be on the path. Instead the package
`runtimes` is created here by hand, with its own folder as the only place to search for its modules.
"""

from __future__ import annotations

import gc
import runpy
import sys
import types
from pathlib import Path


def main() -> None:
    gc.disable()  # modules stay: looking through them while they are loaded takes a sixth of a start; `server.serve` enables it
    package = types.ModuleType("runtimes")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["runtimes"] = package
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
