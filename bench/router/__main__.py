"""Run races that users of llama.cpp's router and LM Studio have reported, against that router and llmux; compare the costs.

Both start the same llama-server with the same tiny models, so differences are their own. It is `--llama-server`, else the one
on PATH, else the one that `python -m tests.support.build_llama_server` has built.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from bench.report import others_share
from bench.router import costs, page
from bench.router.races import RACES, ran
from bench.router.server import COMMANDS, running, write_models
from bench.targets import compiled, temporary_folder
from tests.support import build_llama_server


async def raced(program: Path, folder: Path, rounds: int, only: list[str]) -> page.Outcomes:
    """Run every race with a new server in each round; the two programs take turns."""
    outcomes: page.Outcomes = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for race in RACES:
            for name in COMMANDS if not only or race.run.__name__ in only else ():
                async with running(name, program, folder, race.limit) as server:
                    outcomes[race][name].append(await ran(race, server))
                print(f"{name}: {race.what}: {page.cell(race, outcomes[race][name])}", file=sys.stderr, flush=True)
    return outcomes


def main() -> None:
    names = ", ".join(race.run.__name__ for race in RACES)
    flags = argparse.ArgumentParser(
        prog="bench.router", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--llama-server", type=Path)
    flags.add_argument("--races", nargs="*", default=[], help=f"only these: {names}")
    flags.add_argument("--write", action="store_true", help="into docs/performance.md")
    given = flags.parse_args()
    on_path = shutil.which("llama-server")
    program = given.llama_server or (Path(on_path) if on_path else build_llama_server.built())
    if program is None:
        sys.exit("There is no llama-server: put one on PATH, or `python -m tests.support.build_llama_server`.")
    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    version = re.search(r"version: (\S+)", output.stdout + output.stderr)
    compiled()
    busy = others_share()
    with temporary_folder() as name:
        folder = Path(name)
        write_models(folder)
        outcomes = asyncio.run(raced(program.resolve(), folder, given.rounds, given.races))
        samples = asyncio.run(costs.measured(program.resolve(), folder, given.rounds))
    print("\n".join([*page.table(outcomes, samples), "", page.losses(outcomes, samples)]))
    if given.write:
        page.write(outcomes, samples, version[1] if version else "", given.rounds, max(busy, others_share()))


if __name__ == "__main__":
    main()
