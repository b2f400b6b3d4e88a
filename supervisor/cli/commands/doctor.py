"""`llmux doctor`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from supervisor.cli.exit_codes import ExitCode
from supervisor.cli.options import answer, config_path, json_option


@click.command()
@config_path
@json_option
def doctor(config: Path | None, as_json: bool) -> None:
    """Check everything that llmux needs on this machine, and say how to fix what is wrong."""
    from supervisor.host.distribution import refuse_name_clashes  # noqa: PLC0415  # not for declaring

    try:
        from supervisor.cli import doctor as checks  # noqa: PLC0415  # as above
    except Exception:
        refuse_name_clashes()  # the imports may have loaded another package's `runtimes`
        raise

    found = checks.examine(config)
    failed = any(check.status == "fail" for check in found)
    facts = {"ok": not failed, "checks": [asdict(check) for check in found]}
    answer(facts, *checks.report(found), as_json=as_json)
    if failed:
        sys.exit(ExitCode.FAILED)
