"""`GET /metrics`: llmux's own counters and those of its workers, in Prometheus's text format.

llmux fetches the metrics of all workers in parallel for each request, and adds a `model` label. It leaves out a worker that
doesn't answer in time.

A scraper drops a whole response for one invalid line or one duplicate label, so every line is checked. Malformed samples
are left out. A worker's own label `model` becomes `exported_model` (Prometheus does the same). The samples of a metric are
grouped across workers. A worker's metric with the name of one of llmux's own is left out.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Final

from starlette.responses import Response

from supervisor.daemon.daemon import Daemon
from supervisor.daemon.observability.scrape import metrics_of, ready_workers
from supervisor.daemon.slices import slices
from supervisor.dialects.listed import Pieces

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_NAMES: Final = re.compile(r"^# TYPE (\S+)", re.MULTILINE)
_NAME: Final = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL: Final = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*("(?:[^"\\\n]|\\[\\"n])*")\s*(?:,|$)')
_SAMPLE: Final = re.compile(
    rf'({_NAME})[ \t]*(?:\{{((?:[^"}}]|"(?:[^"\\]|\\.)*")*)\}})?[ \t]*'
    r"(?<=[ \t}])([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|(?i:inf|nan))(?:[ \t]+-?\d+)?)[ \t]*"
)
_ABOUT: Final = re.compile(rf"#[ \t]+(HELP|TYPE)[ \t]+({_NAME})(?:[ \t]+(.*))?")
_PARTS: Final = ("", "_bucket", "_sum", "_count", "_total", "_created")  # suffixes of a metric's samples


async def exposition(daemon: Daemon) -> Response:
    """The response with all metrics."""
    process = await daemon.metrics.own_process()
    own, taken = [process.encode()], set(_NAMES.findall(process))
    async for made in slices(daemon.metrics.lines()):
        own.append("".join(made).encode())
        taken.update(_NAMES.findall("".join([piece for piece in made if piece.startswith("#")])))
    await asyncio.sleep(0)
    ready = ready_workers(daemon)
    texts = await asyncio.gather(*(metrics_of(daemon, model) for model in ready))
    workers = together(zip((model.id for model in ready), texts, strict=True), taken)
    return Pieces([*own, workers], CONTENT_TYPE)


@dataclass(slots=True)
class _Metric:
    about: dict[str, str] = field(default_factory=dict)  # HELP and TYPE lines of the first worker that has them
    samples: list[str] = field(default_factory=list)


def together(texts: Iterable[tuple[str, bytes]], taken: Container[str]) -> bytes:
    """The metrics of several models' workers as one text, each sample with its `model`, without the names in `taken`."""
    metrics: dict[str, _Metric] = {}
    for model, text in texts:
        _add_samples(metrics, model, text.decode("utf-8", "replace"))
    lines = [
        line
        for name, metric in metrics.items()
        if metric.samples and not any(name + part in taken for part in _PARTS)
        for line in (*metric.about.values(), *metric.samples)
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def _add_samples(metrics: dict[str, _Metric], model: str, text: str) -> None:
    quoted = '"{}"'.format(model.replace("\\", "\\\\").replace('"', '\\"'))
    current = ""
    for line in text.split("\n"):
        if line.startswith("#"):
            if about := _ABOUT.fullmatch(line):
                current = about[2]
                metrics.setdefault(current, _Metric()).about.setdefault(about[1], line)
        elif (sample := _SAMPLE.fullmatch(line.strip())) and (
            labels := _labels_with_model(sample[2] or "", quoted)
        ) is not None:
            name = sample[1]
            of = current if current and name in {current + part for part in _PARTS} else name
            metrics.setdefault(of, _Metric()).samples.append(f"{name}{{{labels}}} {sample[3]}")


def _labels_with_model(text: str, model: str) -> str | None:
    """The labels after an added `model`; None if they can't be read, or a label appears twice."""
    found = {"model": model}
    at, text = 0, text.rstrip()
    while at < len(text):
        label = _LABEL.match(text, at)
        if label is None:
            return None
        name = "exported_model" if label[1] == "model" else label[1]
        if name in found:
            return None
        found[name] = label[2]
        at = label.end()
    return ",".join(f"{name}={value}" for name, value in found.items())
