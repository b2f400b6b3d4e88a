"""Fetches one file of known size and sha256. What has come stays, and the next attempt asks for the rest."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, Final

import httpx

from supervisor.io.archives import Asset, ReleaseError
from supervisor.io.archives.releases import TIMEOUT_S, refused

ATTEMPTS: Final = 5  # in a row without a byte
PASSING: Final = frozenset({408, 500, 502, 503, 504})
FIRST_PAUSE_S: Final = 0.2
TELL_S: Final = 5.0

Tell = Callable[[str], None]


def fetch(url: str, asset: Asset, folder: Path, tell: Tell) -> Path:
    """The file in this folder, whole and checked. Blocks. Raises ReleaseError, OSError."""
    path = folder / asset.name
    if path.is_file() and is_whole(path, asset):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{asset.name}.{asset.digest[:12]}.part"
    part.touch()
    with part.open("r+b") as out:
        if out.seek(0, os.SEEK_END) > asset.size:
            out.truncate(0)
            out.seek(0)
        _fill(url, asset, out, tell)
    if not is_whole(part, asset):
        part.unlink()
        raise ReleaseError(
            f"{asset.name} came with another sha256 than it must have ({asset.digest}); nothing of it was used. Try again; if "
            "it happens again, whoever serves it serves something else."
        )
    part.replace(path)
    return path


def is_whole(path: Path, asset: Asset) -> bool:
    """Is it this file? Reads all of it."""
    return path.stat().st_size == asset.size and digest_of(path) == asset.digest


def digest_of(path: Path) -> str:
    """Its sha256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fill(url: str, asset: Asset, out: BinaryIO, tell: Tell) -> None:
    fruitless = 0
    while (there := out.tell()) < asset.size:
        try:
            _read(url, asset, out, tell)
            problem = "the answer ended early"
        except httpx.HTTPError as error:
            problem = str(error) or type(error).__name__
        if (now := out.tell()) >= asset.size:
            return
        fruitless = 0 if now > there else fruitless + 1
        if fruitless == ATTEMPTS:
            raise ReleaseError(
                f"{asset.name} does not come: {problem}. What came is kept; say it again later, or use --from FILE."
            )
        tell(f"{asset.name}: broken off at {now >> 20} of {asset.size >> 20} MiB ({problem}); going on")
        time.sleep(FIRST_PAUSE_S * 2**fruitless)  # of a command, which has no event loop


def _read(url: str, asset: Asset, out: BinaryIO, tell: Tell) -> None:
    there, told = out.tell(), time.monotonic()
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={there}-"} if there else {})
    with httpx.stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as response:
        if response.status_code in PASSING:
            response.raise_for_status()
        if response.is_error:
            raise refused(response, f"the release has no {asset.name}")
        if there and response.status_code != HTTPStatus.PARTIAL_CONTENT:
            out.seek(0)
            out.truncate()
        for chunk in response.iter_bytes():
            out.write(chunk[: asset.size - out.tell()])  # the rest would be none of it
            if (now := time.monotonic()) - told > TELL_S:
                told = now
                tell(f"{asset.name}: {out.tell() >> 20} of {asset.size >> 20} MiB")
            if out.tell() == asset.size:
                return
