"""Ask a database for known vulnerabilities of every package that any lock pins: `make audit`.

pip-audit does this, in its own environment. It gets all further arguments: `--osv-url URL` for another database,
`--ignore-vuln ID` for a finding that doesn't concern us. Exit codes: 0 for a complete audit without findings, 1 for findings,
and 3 for an incomplete audit: a package without an answer is not a clean one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NotRequired, TypedDict

from runtimes.pins import pins
from tools.locks import UV, all_pins, environments

PIP_AUDIT: Final = "pip-audit==2.10.1"
FOUND: Final = 1
NOT_AUDITED: Final = 3


class Vulnerability(TypedDict):
    """A vulnerability in pip-audit's report."""

    id: str
    aliases: list[str]
    fix_versions: list[str]


class Package(TypedDict):
    """An audited package in pip-audit's report."""

    name: str
    vulns: NotRequired[list[Vulnerability]]


class Report(TypedDict):
    """The report of one call of pip-audit."""

    dependencies: list[Package]


def batches(wanted: Collection[str]) -> list[list[str]]:
    """Split pins into batches with one version of a package each, as a requirements file demands."""
    versions: defaultdict[str, list[str]] = defaultdict(list)
    for pin in sorted(wanted):
        versions[pin.partition("==")[0]].append(pin)
    most = max(map(len, versions.values()), default=0)
    return [[found[index] for found in versions.values() if index < len(found)] for index in range(most)]


def holders(pin: str) -> str:
    """The names of the environments whose locks have this pin."""
    return ", ".join(name for name, locks in environments().items() if pin in pins(locks))


def audit(wanted: Collection[str], words: Sequence[str] = ()) -> int:
    """Print the known vulnerabilities, and return the exit code."""
    audited: set[str] = set()
    findings: list[str] = []
    problem = ""
    for batch in batches(wanted):
        report, problem = _audit_batch(batch, words)
        if problem:
            break
        audited |= {pin for pin, _ in report}
        findings += [f"{pin} ({holders(pin) or 'no lock'}): {advisory}" for pin, vulns in report for advisory in vulns]
    for line in findings:
        sys.stdout.write(f"{line}\n")
    if missing := sorted({*wanted} - audited):
        what = f"audited {len(audited)} of {len(wanted)} packages" if audited else "audited nothing"
        why = f"the database could not be asked: {problem}" if problem else f"not known there: {', '.join(missing)}"
        sys.stdout.write(f"{what}: {why}\n")
    else:
        sys.stdout.write(f"audited {len(audited)} packages, known vulnerabilities: {len(findings)}\n")
    return FOUND if findings else NOT_AUDITED if missing else 0


def _audit_batch(batch: Sequence[str], words: Sequence[str]) -> tuple[list[tuple[str, list[str]]], str]:
    """Each package with its findings, and no problem; or no packages, and the problem."""
    with tempfile.TemporaryDirectory() as folder:
        listed, report = Path(folder, "requirements.txt"), Path(folder, "report.json")
        listed.write_text("\n".join(batch), encoding="utf-8")
        fixed = ("--no-deps", "--disable-pip", "--vulnerability-service=osv", "--desc=off", "--progress-spinner=off")
        argv = [UV, "tool", "run", "--quiet", PIP_AUDIT, *fixed, "--format=json", f"--requirement={listed}"]
        done = subprocess.run(
            [*argv, f"--output={report}", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        # pip-audit's exit code is 1 for findings and for failures; only findings leave a report.
        if not report.exists() or not (text := report.read_text(encoding="utf-8")):
            lines = done.stderr.strip().splitlines()
            return [], lines[-1] if lines else f"{PIP_AUDIT} ended with exit code {done.returncode}"
    named = {pin.partition("==")[0].lower(): pin for pin in batch}
    return list(_advisories(json.loads(text), named)), ""


def _advisories(report: Report, named: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    for package in report["dependencies"]:
        if "vulns" in package:  # else pip-audit skipped the package
            yield named[package["name"].lower()], [_finding_text(vuln) for vuln in package["vulns"]]


def _finding_text(vuln: Vulnerability) -> str:
    fixed = f"fixed in {', '.join(vuln['fix_versions'])}" if vuln["fix_versions"] else "no fix known"
    return f"{' '.join([vuln['id'], *vuln['aliases']])}, {fixed}"


if __name__ == "__main__":
    sys.exit(audit(all_pins(), sys.argv[1:]))
