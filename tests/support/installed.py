"""The command under the name by which it is installed, as completion asks for it: `python -m` has another name."""

from __future__ import annotations

from supervisor.cli.main import main

if __name__ == "__main__":
    main(prog_name="llmux")
