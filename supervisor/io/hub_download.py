"""Downloads files of a hub; an interrupted download costs as little as possible.

There are two downloaders. Ours resumes. The hub's own fetches what is stored as Xet, and files above 50 GB, which plain
requests don't get; it keeps nothing of a file that was interrupted. Either way a file takes its place only when its size
and hash are what the hub says:

    <folder>/<file>                     complete
    <folder>/<file>.<hash>.part         incomplete; the next attempt asks for the rest
    <folder>/.llmux-pull.hub/<hash>/    where the hub's own downloader works
    <folder>/.llmux-pull.json           what was hashed when, so that nothing is hashed twice
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.util
import json
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from supervisor.io.files import lock, replacing, turn
from supervisor.io.hub import OWN, REFUSED, TIMEOUT_S, File, HubError, Listing, answer, client, explained, line_of

RECORD: Final = f"{OWN}.json"
LOCK: Final = f"{OWN}.lock"
ASIDE: Final = f"{OWN}.hub"
AT_ONCE: Final = 4
ATTEMPTS: Final = 5  # in a row without a byte
PASSING: Final = (408, 429)  # errors of the client that are worth a retry
FIRST_PAUSE_S: Final = 0.1
HEEDS_CTRL_C_S: Final = 0.5
BESIDE_BYTES: Final = 16 << 20
"""Of its own logs and records, the hub's own downloader may write more than the file has."""

Told = Callable[[str], None]
_T = TypeVar("_T")


def recorded(folder: Path) -> list[str]:
    """The names of the files in this folder that were fetched and hashed."""
    return list(_record_of(folder))


def forget(folder: Path, names: Sequence[str]) -> None:
    """Let the record say that these were never fetched; where nothing is left of it, it goes. Raises OSError."""
    left = {name: mark for name, mark in _record_of(folder).items() if name not in names}
    if left:
        _write_record(folder, left)
    else:
        for own in (RECORD, LOCK):
            (folder / own).unlink(missing_ok=True)


def takes_hubs_own(size: int, *, xet: bool, begun: bool, largest_plain: int) -> bool:
    """Does the hub's own downloader fetch this file? Ours finishes what it has begun and can finish."""
    return size > largest_plain or (xet and not begun)


class Copy:
    """The local copy of a listing: what is there, and how the rest is fetched."""

    def __init__(self, listing: Listing, folder: Path) -> None:
        self.listing = listing
        self.folder = folder
        self._writing = threading.Lock()
        self._came: set[str] = set()
        self._with_hub: File | None = None

    def missing(self, *, verify: bool = False) -> list[File]:
        """Files that are missing, incomplete or wrong. Hashes those not hashed before; with `verify`, all."""
        record = _record_of(self.folder)
        return [file for file in self.listing.files if not self._is_there(file, record, verify=verify)]

    def size_there(self, file: File) -> int:
        """How many bytes have come of a file that was missing. Cheap."""
        if file.name in self._came:
            return file.size
        with contextlib.suppress(OSError):  # it may be moved meanwhile
            if file == self._with_hub:
                sizes = [path.stat().st_size for path in self._aside(file).rglob("*") if path.is_file()]
                return min(max(sizes, default=0), file.size)
            return min(self._part(file).stat().st_size, file.size)
        return 0

    def clear(self) -> None:
        """Remove what the hub's own downloader left when it was killed: it can't use that."""
        if (self.folder / ASIDE).exists():
            with contextlib.suppress(OSError), (self.folder / LOCK).open("wb") as file:
                if lock(file):  # else another pull is at it
                    shutil.rmtree(self.folder / ASIDE)

    def fetch(self, files: Sequence[File], tell: Told) -> None:
        """Get these files, reporting each. Blocks. Raises HubError or OSError; what has come stays."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stop = threading.Event()
        waiting = functools.partial(tell, f"{self.folder}: waiting for another pull to finish")
        with (
            turn(self.folder / LOCK, waiting) as waited,
            ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pull") as threads,
        ):
            if waited:  # the other pull has most likely fetched them
                missing = self.missing(verify=True)
                self._came.update(file.name for file in files if file not in missing)
                files = [file for file in files if file in missing]
            try:
                hubs = dict(
                    zip(files, _each(threads, lambda file: self._takes_hubs_own(file, stop), files), strict=True)
                )
                own = functools.partial(self._download, tell=tell, stop=stop)
                for _ in _each(threads, lambda file: self._fetch(file, tell, own), [f for f in files if not hubs[f]]):
                    pass
                for file in [file for file in files if hubs[file]]:  # in this thread, which Ctrl-C interrupts
                    tell(f"{file.name}: comes by the hub's own downloader; interrupted, it begins anew")
                    self._fetch(file, tell, self._download_by_hub)
            except BaseException:
                stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch(self, file: File, tell: Told, download: Callable[[File, Path], None]) -> None:
        path, part = self.folder / file.name, self._part(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        for again in (False, True):
            download(file, part)
            if file.is_of(part):
                break
            part.unlink()
            if again:
                raise HubError(f"{self.listing.repo}: {file.name} arrived twice with another hash than the hub says.")
            tell(f"{file.name}: arrived with another hash than the hub says; once more")
        part.replace(path)
        for old in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
            old.unlink(missing_ok=True)
        self._remember(file)
        self._came.add(file.name)
        tell(f"{file.name}: {file.size} bytes, verified")

    def _takes_hubs_own(self, file: File, stop: threading.Event) -> bool:
        hub, part = client(), self._part(file)
        able = not hub.constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet") is not None
        xet = able and file.is_large and self._is_xet(file, stop)
        begun = part.exists() and part.stat().st_size > 0
        return takes_hubs_own(file.size, xet=xet, begun=begun, largest_plain=hub.constants.MAX_HTTP_DOWNLOAD_SIZE)

    def _is_xet(self, file: File, stop: threading.Event) -> bool:
        """Is the file stored as Xet? Raises HubError."""
        hub, fruitless = client(), 0
        while not stop.is_set():  # the client's own retries can't be stopped
            try:
                found = hub.get_hf_file_metadata(self.listing.url(file), timeout=TIMEOUT_S)
            except Exception as error:
                fruitless += 1
                if _is_final(error) or fruitless == ATTEMPTS:
                    raise explained(error, self.listing.repo, self.listing.commit) from error
                _pause(fruitless, stop)
                continue
            if found.xet_file_data is not None and found.size != file.size:
                raise HubError(f"{self.listing.repo}: the hub lists {file.name} with another size than it has as Xet.")
            return found.xet_file_data is not None
        raise InterruptedError

    def _download_by_hub(self, file: File, part: Path) -> None:
        """Let the hub's own downloader fill `part`. It works aside, because it removes an older file first."""
        hub, listing = client(), self.listing
        if part.exists() and part.stat().st_size == file.size:
            return  # interrupted before it was hashed
        part.unlink(missing_ok=True)  # of no use, and its space is counted as free
        hub.utils.disable_progress_bars()
        self._with_hub = file
        try:
            with _no_file_above(file.size + BESIDE_BYTES):
                came = hub.hf_hub_download(
                    listing.repo,
                    file.name,
                    repo_type=listing.kind,
                    revision=listing.commit,
                    local_dir=self._aside(file),
                )
            Path(came).replace(part)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, hub.errors.LocalEntryNotFoundError) else None
            raise self._given_up(file, error if cause is None else cause) from error
        finally:
            self._with_hub = None
            shutil.rmtree(self.folder / ASIDE, ignore_errors=True)

    def _given_up(self, file: File, error: BaseException) -> HubError:
        """Why the hub's own downloader failed, with the remedy."""
        hub, largest = client(), client().constants.MAX_HTTP_DOWNLOAD_SIZE
        if isinstance(error, hub.errors.HfHubHTTPError) and error.response.status_code in REFUSED:
            return explained(error, self.listing.repo, self.listing.commit)
        if file.size <= largest:
            remedy = "try again, or with HF_HUB_DISABLE_XET=1, which goes on where it was cut off"
        else:
            remedy = (
                f"files above {largest // 10**9} GB come by Xet alone: try later, unset HF_HUB_DISABLE_XET, "
                "reinstall llmux, hf-xet comes along, or set HF_ENDPOINT to a hub that has it as Xet"
            )
        return HubError(
            f"{self.listing.repo}: {file.name}: the hub's own downloader gave up ({line_of(error)}); {remedy}"
        )

    def _download(self, file: File, part: Path, tell: Told, stop: threading.Event) -> None:
        """Fill `part` up to the file's size, however often the connection breaks, as long as bytes come."""
        hub = client()
        fruitless = 0
        part.touch()
        with part.open("r+b") as out:
            if out.seek(0, os.SEEK_END) > file.size:
                _empty(out)
            while (there := out.tell()) < file.size:
                try:
                    self._read(file, out, stop)
                    problem: Exception = EOFError("the answer ended early")
                except hub.errors.HfHubHTTPError as error:
                    if _is_final(error):
                        raise explained(error, self.listing.repo, self.listing.commit) from error
                    problem = error
                except OSError:  # the disk's: the client's errors are no OSError
                    raise
                except Exception as error:  # noqa: BLE001  # whatever broke, what has come is kept and checked
                    problem = error
                if (now := out.tell()) >= file.size:
                    break
                fruitless = 0 if now > there else fruitless + 1
                if fruitless == ATTEMPTS:
                    raise explained(problem, self.listing.repo, self.listing.commit) from problem
                tell(f"{file.name}: broken off at {now} of {file.size} bytes ({line_of(problem)}); going on")
                _pause(fruitless, stop)

    def _read(self, file: File, out: BinaryIO, stop: threading.Event) -> None:
        """Request what is missing, and append it: up to the file's size, whatever else comes."""
        there = out.tell()
        headers = {"Accept-Encoding": "identity"}
        if there:
            headers["Range"] = f"bytes={there}-"
        with answer(self.listing.url(file), headers) as response:
            if there and response.status_code != HTTPStatus.PARTIAL_CONTENT:
                _empty(out)
            for chunk in response.iter_bytes():
                if stop.is_set():
                    raise InterruptedError
                out.write(chunk[: file.size - out.tell()])
                if out.tell() == file.size:  # the rest would be none of it
                    break

    def _part(self, file: File) -> Path:
        path = self.folder / file.name
        return path.with_name(f"{path.name}.{file.digest[:12]}.part")

    def _aside(self, file: File) -> Path:
        return self.folder / ASIDE / file.digest[:12]

    def _is_there(self, file: File, record: dict[str, list[object]], *, verify: bool) -> bool:
        path = self.folder / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        if not verify and record.get(file.name) == _mark(path, file):
            return True
        if not file.is_of(path):
            return False
        self._remember(file)
        return True

    def _remember(self, file: File) -> None:
        with self._writing:
            _write_record(self.folder, _record_of(self.folder) | {file.name: _mark(self.folder / file.name, file)})


@contextlib.contextmanager
def _no_file_above(size: int) -> Iterator[None]:
    """Within the block, no file of this process grows beyond that: writing fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = [limit for limit in (size, soft) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _record_of(folder: Path) -> dict[str, list[object]]:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _write_record(folder: Path, record: dict[str, list[object]]) -> None:
    with replacing(folder / RECORD) as fresh:
        fresh.write_text(json.dumps(record, indent=1), encoding="utf-8")


def _each(threads: ThreadPoolExecutor, function: Callable[[File], _T], files: Sequence[File]) -> Iterator[_T]:
    """As the pool's `map`, but Ctrl-C ends it soon: one that comes just before an endless wait is noticed after it."""
    for future in [threads.submit(function, file) for file in files]:
        while not wait((future,), HEEDS_CTRL_C_S).done:
            pass
        yield future.result()


def _is_final(error: BaseException) -> bool:
    """Is a retry useless?"""
    if not isinstance(error, client().errors.HfHubHTTPError):
        return False
    status: int = error.response.status_code
    return status < 500 and status not in PASSING


def _pause(fruitless: int, stop: threading.Event) -> None:
    stop.wait(min(FIRST_PAUSE_S * 2**fruitless, 5.0))


def _empty(out: BinaryIO) -> None:
    out.seek(0)
    out.truncate()


def _mark(path: Path, file: File) -> list[object]:
    """What identifies a file that was hashed."""
    stat = path.stat()
    return [file.digest, stat.st_size, stat.st_mtime_ns]
