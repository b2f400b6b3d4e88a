"""A project's releases: the files of a build, with their sizes and sha256, and fetching them.

A digest comes from the first of these sources that knows the file: the digests that this llmux pins; the digests noted on this
machine; the release's API, which is used only for a build that a person has named. The API's digests are noted beside the
environments, in a file that a person can read, keep, and copy to other machines. "The latest" is never requested: it may be
half uploaded.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Final

import httpx

from supervisor.host.environments.archives import ReleaseError
from supervisor.host.hub import download
from supervisor.host.hub.download import File, Origin, line_of, read_up_to
from supervisor.host.store.files import replacing

VARIABLE: Final = "LLMUX_LLAMA_CPP_RELEASES"
"""A mirror's address: it has `download/BUILD/FILE` and, for other builds than the pinned one, `tags/BUILD`."""
NOTED: Final = "digests.json"
ANSWER_BYTES: Final = 8 << 20
PASSING: Final = (408, 500, 502, 503, 504)  # worth another attempt
PROGRESS_INTERVAL_S: Final = 5.0
BUILD: Final = re.compile(r"b[0-9]{1,9}")
_SHA256: Final = re.compile(r"sha256:([0-9a-f]{64})")


class Releases:
    """The releases of one project. llmux has the digests of the build `pinned`; the file `noted` may not exist yet."""

    def __init__(self, pins: Path, noted: Path) -> None:
        pinned = json.loads(pins.read_text(encoding="utf-8"))
        self.repository: str = pinned["repository"]
        self.pinned: str = pinned["build"]
        self._assets = _files_from(pinned["assets"])
        self._noted = noted

    def known(self, name: str) -> File | None:
        """The file of this name, where a digest of it is pinned or noted. Raises ReleaseError, OSError."""
        return self._assets.get(name) or self._read_noted().get(name)

    def fetch(self, build: str, name: str, folder: Path, notify: download.Notify, *, ask: bool = False) -> Path:
        """Fetch the file of this name into this folder, whole and checked. `ask`: the API may give the digest of an unknown file.

        Blocks. Raises ReleaseError, OSError.
        """
        asset = self.known(name) or (self._list_files(build).get(name) if ask else None)
        if asset is None:
            raise ReleaseError(f"llama.cpp's release {build} has no {name}, as far as is known here.")
        base = (os.environ.get(VARIABLE) or f"https://github.com/{self.repository}/releases").rstrip("/")
        notify(f"{name}: {asset.size >> 20} MiB from {base}")
        path, reported_at = folder / name, time.monotonic()
        if path.is_file() and asset.is_of(path):
            return path

        def on_progress(there: int) -> None:
            nonlocal reported_at
            if (now := time.monotonic()) - reported_at > PROGRESS_INTERVAL_S:
                reported_at = now
                notify(f"{name}: {there >> 20} of {asset.size >> 20} MiB")

        ask_for = functools.partial(_open_response, f"{base}/download/{build}/{name}")
        origin = Origin(ask_for, PASSING, functools.partial(_download_error, name))
        stop = threading.Event()  # never set: Ctrl-C interrupts a command's main thread
        fill = functools.partial(
            download.resume, asset, origin=origin, notify=notify, stop=stop, on_progress=on_progress
        )
        wrong = ReleaseError(
            f"{name} came with another sha256 than it must have ({asset.digest}); nothing of it was used. Try again; if "
            "it happens again, whoever serves it serves something else."
        )
        return download.fetch(asset, folder, fill, wrong, notify)

    def note(self, found: Iterable[File]) -> None:
        """Keep the files' digests in a file that people can read. Raises ReleaseError, OSError."""
        self._noted.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._noted) as fresh:
            noted = {file.name: (file.size, file.digest) for file in (*self._read_noted().values(), *found)}
            fresh.write_text(json.dumps(noted, indent=2) + "\n", encoding="utf-8")

    def _read_noted(self) -> dict[str, File]:
        try:
            return _files_from(json.loads(self._noted.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError, TypeError) as error:
            raise ReleaseError(f"{self._noted} is damaged; move it away.") from error

    def _list_files(self, build: str) -> dict[str, File]:
        base = os.environ.get(VARIABLE) or f"https://api.github.com/repos/{self.repository}/releases"
        address = f"{base.rstrip('/')}/tags/{build}"
        try:
            with _open_response(address) as response:
                content = read_up_to(response, ANSWER_BYTES + 1)
            if len(content) > ANSWER_BYTES:
                raise ReleaseError(f"{address} answers with more than a release's list of files.")
            listed = json.loads(content)["assets"]
            pins = {
                str(one["name"]): (one["size"], digest[1])
                for one in listed
                if one.get("state", "uploaded") == "uploaded" and (digest := _SHA256.fullmatch(one.get("digest") or ""))
            }
            found = _files_from(pins)
        except httpx.HTTPStatusError as error:
            raise _status_error(error.response, f"llama.cpp has no release {build}") from error
        except httpx.HTTPError as error:
            raise ReleaseError(
                f"{address}: {error}; try again later, or carry the archive here: --from FILE"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReleaseError(f"{address} doesn't list a release's files with their digests.") from error
        self.note(found.values())
        return found


def _files_from(listed: Mapping[str, tuple[int, str]]) -> dict[str, File]:
    return {name: File(name, int(size), str(digest)) for name, (size, digest) in listed.items()}


@contextlib.contextmanager
def _open_response(url: str, headers: Mapping[str, str] | None = None) -> Iterator[httpx.Response]:
    """A response with an unread body. Raises httpx.HTTPError."""
    with httpx.stream("GET", url, headers=headers, timeout=download.TIMEOUT_S, follow_redirects=True) as response:
        response.raise_for_status()
        yield response


def _download_error(name: str, error: Exception) -> ReleaseError:
    """The error of a failed download of this file, with the remedy."""
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in PASSING:
        return _status_error(error.response, f"the release has no {name}")
    return ReleaseError(
        f"{name} does not come: {line_of(error)}. What came is kept; say it again later, or use --from FILE."
    )


def _status_error(response: httpx.Response, missing: str) -> ReleaseError:
    """The error of a server's status; `missing` words a 404."""
    status, limited = response.status_code, response.headers.get("x-ratelimit-remaining") == "0"
    if status == HTTPStatus.NOT_FOUND:
        return ReleaseError(f"{missing}: {response.url} answers 404.")
    if status == HTTPStatus.TOO_MANY_REQUESTS or (status == HTTPStatus.FORBIDDEN and limited):
        wait = response.headers.get("retry-after")
        when = f"in {wait} s" if wait else "in an hour"
        return ReleaseError(
            f"{response.url.host} has had too many requests from here; try again {when}, or use --from FILE."
        )
    return ReleaseError(f"{response.url} answers {status}; try again later, or carry the archive here: --from FILE")
