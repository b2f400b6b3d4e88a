"""Programs that run a fake, whatever they are called and wherever they stand."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def program(path: Path, fake: str) -> Path:
    """A program there that runs `fake`, such as `fake_servers.run_tgi`, with its words."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable} -IS\n{code(fake)}")
    path.chmod(0o755)
    return path


def code(fake: str) -> str:
    """What such a program consists of."""
    module, _, function = fake.partition(".")
    return (
        f"import sys\nsys.path.append({str(REPOSITORY)!r})\n"
        f"from tests.support.{module} import {function}\nsys.exit({function}(sys.argv[1:]))\n"
    )
