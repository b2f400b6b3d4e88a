"""Run a worker program so that it sees its own environment and this package, and nothing else of where llmux lives.

    <venv>/bin/python -I bootstrap.py runtimes.<runtime>.worker '{"model": …, "host": …, "port": …}'

The folder above `runtimes` may be the supervisor's own site-packages, so it must not be put on the path. Instead the
package is made here, by hand, with its folder as the only place to look for its modules.
"""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path


def main() -> None:
    package = types.ModuleType("runtimes")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["runtimes"] = package
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
