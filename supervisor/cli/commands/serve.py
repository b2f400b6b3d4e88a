"""`llmux serve` and `llmux demo`."""

from __future__ import annotations

import gc
import signal
import sys
from pathlib import Path

import click

from supervisor.cli.exit_codes import ExitCode
from supervisor.cli.options import Flags, config_path, json_option, server_options

takeover_option = click.option(
    "--takeover",
    is_flag=True,
    help="Take over from the daemon that runs on the same state directory, if one does: no request fails, no model reloads.",
)


@click.command()
@config_path
@click.option(
    "--demo", is_flag=True, help="Serve tiny scripted models; installs the embedded llama.cpp runtime if needed."
)
@takeover_option
@server_options
@json_option
def serve(config: Path | None, demo: bool, takeover: bool, flags: Flags, as_json: bool) -> None:
    """Run the daemon until it is told to stop. --json prints its address as a line of JSON.

    PATH may also be a folder with models, or a GGUF file: it serves the models in there, and needs no configuration.
    """
    if demo and config is not None:
        raise click.UsageError("--demo has a configuration of its own: leave out --demo, or --config.")
    _start_daemon(config, flags, demo=demo, takeover=takeover, as_json=as_json)


@click.command()
@takeover_option
@server_options
@json_option
def demo(takeover: bool, flags: Flags, as_json: bool) -> None:
    """Serve tiny scripted models to see how everything works; the same as serve --demo."""
    _start_daemon(None, flags, demo=True, takeover=takeover, as_json=as_json)


def _start_daemon(config: Path | None, flags: Flags, *, demo: bool, takeover: bool, as_json: bool) -> None:
    signal.signal(signal.SIGTERM, _exit_at_sigterm)
    gc.disable()  # objects of the start live on: collecting would take a sixth of the start
    from supervisor.host.distribution import refuse_name_clashes  # noqa: PLC0415  # not for declaring

    refuse_name_clashes()  # before any import of `runtimes`, which might be another package's
    from supervisor.cli.serving.serve import serve as run_daemon  # noqa: PLC0415

    run_daemon(config, flags, demo=demo, takeover=takeover, as_json=as_json)


def _exit_at_sigterm(*_: object) -> None:
    """Exit at a SIGTERM before the daemon runs, when there is nothing to stop yet."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not become the exit code
    sys.exit(ExitCode.DONE)
