"""`llmux bench`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import click

from supervisor.cli.client import Client
from supervisor.cli.exit_codes import ExitCode
from supervisor.cli.options import answer, config_option, daemon_options, model_argument


@click.command()
@model_argument(required=False, public=True)
@click.option(
    "--gpu-report",
    is_flag=True,
    help="Instead: which GPU computes with which driver and build of llama.cpp, as a block to paste; it names no machine, user or model.",
)
@click.option(
    "--devices",
    metavar="NAMES",
    help="Where to try it: cuda, cpu, or names such as gpu1, separated by commas. Default: cuda and cpu, where both exist.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    help="Longest answer of a model that writes. Default: 128; with --ocr 2048.",
)
@click.option(
    "--ocr",
    is_flag=True,
    help="Let a model with vision read a built-in page, the same each time; its first answer is reported separately.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Requests that count, after one that warms up; the median is shown.",
)
@click.option(
    "--prompt", metavar="TEXT", help="What the model shall answer, speak, or embed. Default: a built-in text."
)
@config_option
@daemon_options
def bench(
    model: str | None,
    gpu_report: bool,
    devices: str | None,
    tokens: int | None,
    ocr: bool,
    rounds: int,
    prompt: str | None,
    config: Path | None,
    daemon: Client,
    as_json: bool,
) -> None:
    """Compare MODEL's speed on GPU and processor, with a temporary worker on each in turn; nothing is evicted for it."""
    if gpu_report and model is not None:
        raise click.UsageError("--gpu-report takes no MODEL: it asks a tiny one of its own.")
    if gpu_report:
        from supervisor.cli.bench import gpu_report as reporting  # noqa: PLC0415  # not for declaring

        result = reporting.report(functools.partial(click.echo, err=True))
        answer(result.as_json(), *result.lines(), as_json=as_json)
        if result.failed:
            sys.exit(ExitCode.FAILED)
        return
    if model is None:
        raise click.UsageError("Name a MODEL to measure, or give --gpu-report.")
    from supervisor.cli.bench import comparison  # noqa: PLC0415  # not for declaring

    words = [word.strip() for word in (devices or "").split(",") if word.strip()]
    options = comparison.Options(model, words, rounds, tokens, prompt, daemon, ocr=ocr)
    found = comparison.run(options, config, functools.partial(click.echo, err=True))
    answer(found.as_json(), *found.report(), as_json=as_json)
    if found.failed:
        sys.exit(ExitCode.FAILED)
