"""Wheels built on the spot, for tests of what installs them."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path


def wheel(
    folder: Path, name: str, version: str, *, tag: str = "py3-none-any", requires: Sequence[str] = (), text: str = ""
) -> str:
    """A wheel with one module, which knows its version; returns its hash."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    content = {
        f"{name}.py": f"version = {version!r}\n{text}\n",
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {other}\n" for other in requires),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = ""
    for path, inner in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(inner.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(inner)}\n"
    content[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for place, inner in content.items():
            archive.writestr(zipfile.ZipInfo(place), inner)
    return hashlib.sha256(path.read_bytes()).hexdigest()
