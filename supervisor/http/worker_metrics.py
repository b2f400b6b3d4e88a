"""Workers' own metrics, put together into one text that Prometheus takes.

A scraper drops a whole response for one invalid line or one duplicate label, so every line is checked. Malformed samples
are left out. A worker's own label `model` becomes `exported_model` (Prometheus does the same). The samples of a metric are
grouped across workers. Names of llmux's own metrics are not taken from workers.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Final

_NAME: Final = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL: Final = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*("(?:[^"\\\n]|\\[\\"n])*")\s*(?:,|$)')
_SAMPLE: Final = re.compile(
    rf'({_NAME})[ \t]*(?:\{{((?:[^"}}]|"(?:[^"\\]|\\.)*")*)\}})?[ \t]*'
    r"(?<=[ \t}])([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|(?i:inf|nan))(?:[ \t]+-?\d+)?)[ \t]*"
)
_ABOUT: Final = re.compile(rf"#[ \t]+(HELP|TYPE)[ \t]+({_NAME})(?:[ \t]+(.*))?")
_PARTS: Final = ("", "_bucket", "_sum", "_count", "_total", "_created")  # what a metric's samples may add to its name


@dataclass(slots=True)
class _Metric:
    about: dict[str, str] = field(default_factory=dict)  # HELP and TYPE, as the first worker tells them
    samples: list[str] = field(default_factory=list)


def together(texts: Iterable[tuple[str, bytes]], taken: Container[str]) -> bytes:
    """The metrics of several models' workers as one text, each sample with its `model`; names in `taken` are left out."""
    metrics: dict[str, _Metric] = {}
    for model, text in texts:
        _read(metrics, model, text.decode("utf-8", "replace"))
    lines = [
        line
        for name, metric in metrics.items()
        if metric.samples and not any(name + part in taken for part in _PARTS)
        for line in (*metric.about.values(), *metric.samples)
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def _read(metrics: dict[str, _Metric], model: str, text: str) -> None:
    quoted = '"{}"'.format(model.replace("\\", "\\\\").replace('"', '\\"'))
    current = ""
    for line in text.split("\n"):
        if line.startswith("#"):
            if about := _ABOUT.fullmatch(line):
                current = about[2]
                metrics.setdefault(current, _Metric()).about.setdefault(about[1], line)
        elif (sample := _SAMPLE.fullmatch(line.strip())) and (labels := _labels(sample[2] or "", quoted)) is not None:
            name = sample[1]
            of = current if current and name in {current + part for part in _PARTS} else name
            metrics.setdefault(of, _Metric()).samples.append(f"{name}{{{labels}}} {sample[3]}")


def _labels(text: str, model: str) -> str | None:
    """The labels with `model` before them; None where they can't be read, or one stands twice."""
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
