"""Fetches the files of a hub's listing into a folder.

There are two downloaders. Ours (host/hub/download.py) resumes. The hub's own fetches files stored as Xet, and files above 50 GB,
which plain requests don't get; it keeps nothing of an interrupted file. Either way a file is moved to its path only with the
size and hash that the hub lists. Besides the files and their parts there are:

    <folder>/.llmux-pull.hub/<hash>/    the work folder of the hub's own downloader
    <folder>/.llmux-pull.json           the hashes and their times, so that no file is hashed twice
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import resource
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, TypeVar

from supervisor.host.hub import download
from supervisor.host.hub.download import TIMEOUT_S, File, Notify, line_of, pause
from supervisor.host.hub.hub import OWN, REFUSED, HubError, Listing, client, explained
from supervisor.host.store.files import lock, locked, replacing

RECORD: Final = f"{OWN}.json"
LOCK: Final = f"{OWN}.lock"
WORK_FOLDER: Final = f"{OWN}.hub"
AT_ONCE: Final = 4
HEEDS_CTRL_C_S: Final = 0.5
BESIDE_BYTES: Final = 16 << 20
"""The hub's own downloader may write this much besides the file: its logs and records."""

_T = TypeVar("_T")


def recorded(folder: Path) -> list[str]:
    """The names of the files in this folder that were fetched and hashed."""
    return list(_record_of(folder))


def forget(folder: Path, names: Sequence[str]) -> None:
    """Delete these files from the record, and an empty record itself. Raises OSError."""
    left = {name: mark for name, mark in _record_of(folder).items() if name not in names}
    if left:
        _write_record(folder, left)
    else:
        for own in (RECORD, LOCK):
            (folder / own).unlink(missing_ok=True)


def takes_hubs_own(size: int, *, xet: bool, begun: bool, largest_plain: int) -> bool:
    """Does the hub's own downloader fetch this file? Ours finishes files that it has begun, if it can."""
    return size > largest_plain or (xet and not begun)


class Copy:
    """The local copy of a listing: checks the present files and fetches the missing ones."""

    def __init__(self, listing: Listing, folder: Path) -> None:
        self.listing = listing
        self.folder = folder
        self._writing = threading.Lock()
        self._fetched: set[str] = set()
        self._with_hub: File | None = None

    def missing(self, *, verify: bool = False) -> list[File]:
        """Files that are missing, incomplete or wrong. Hashes files not hashed before; with `verify`, all."""
        record = _record_of(self.folder)
        return [file for file in self.listing.files if not self._is_there(file, record, verify=verify)]

    def size_there(self, file: File) -> int:
        """The bytes received so far of a file that was missing. Cheap."""
        if file.name in self._fetched:
            return file.size
        with contextlib.suppress(OSError):  # the file may be moved meanwhile
            if file == self._with_hub:
                sizes = [path.stat().st_size for path in self._work_folder(file).rglob("*") if path.is_file()]
                return min(max(sizes, default=0), file.size)
            return min(file.part(self.folder).stat().st_size, file.size)
        return 0

    def clear(self) -> None:
        """Remove the files of a killed download by the hub's own downloader, which can't resume."""
        if (self.folder / WORK_FOLDER).exists():
            with contextlib.suppress(OSError), (self.folder / LOCK).open("wb") as file:
                if lock(file):  # else another pull is running
                    shutil.rmtree(self.folder / WORK_FOLDER)

    def fetch(self, files: Sequence[File], notify: Notify) -> None:
        """Fetch these files, reporting each. Blocks. Raises HubError or OSError; complete files and parts stay."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stop = threading.Event()
        waiting = functools.partial(notify, f"{self.folder}: waiting for another pull to finish")
        with (
            locked(self.folder / LOCK, waiting) as waited,
            ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pull") as threads,
        ):
            if waited:  # the other pull has most likely fetched the files
                missing = self.missing(verify=True)
                self._fetched.update(file.name for file in files if file not in missing)
                files = [file for file in files if file in missing]
            try:
                hubs = dict(
                    zip(
                        files,
                        _map_interruptible(threads, lambda file: self._takes_hubs_own(file, stop), files),
                        strict=True,
                    )
                )
                for _ in _map_interruptible(
                    threads, lambda file: self._fetch_file(file, notify, stop), [f for f in files if not hubs[f]]
                ):
                    pass
                for file in [file for file in files if hubs[file]]:  # in this thread, because Ctrl-C interrupts it
                    notify(f"{file.name}: comes by the hub's own downloader; interrupted, it begins anew")
                    self._fetch_file(file, notify, stop, by_hub=True)
            except BaseException:
                stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch_file(self, file: File, notify: Notify, stop: threading.Event, *, by_hub: bool = False) -> None:
        resume = functools.partial(download.resume, file, origin=self.listing.origin(file), notify=notify, stop=stop)
        fill = functools.partial(self._download_by_hub, file) if by_hub else resume
        wrong = HubError(f"{self.listing.repo}: {file.name} arrived twice with another hash than the hub says.")
        download.fetch(file, self.folder, fill, wrong, notify)
        self._record_hash(file)
        self._fetched.add(file.name)
        notify(f"{file.name}: {file.size} bytes, verified")

    def _takes_hubs_own(self, file: File, stop: threading.Event) -> bool:
        hub, part = client(), file.part(self.folder)
        able = not hub.constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet") is not None
        xet = able and not file.is_git_blob and self._is_xet(file, stop)
        begun = part.exists() and part.stat().st_size > 0
        return takes_hubs_own(file.size, xet=xet, begun=begun, largest_plain=hub.constants.MAX_HTTP_DOWNLOAD_SIZE)

    def _is_xet(self, file: File, stop: threading.Event) -> bool:
        """Is the file stored as Xet? Raises HubError."""
        hub, origin, fruitless = client(), self.listing.origin(file), 0
        while True:  # the client's own retries can't be stopped
            try:
                found = hub.get_hf_file_metadata(self.listing.url(file), timeout=TIMEOUT_S)
            except Exception as error:  # noqa: BLE001  # the origin judges it
                fruitless += 1
                origin.check(error, fruitless)
                pause(fruitless, stop)
                continue
            if found.xet_file_data is not None and found.size != file.size:
                raise HubError(f"{self.listing.repo}: the hub lists {file.name} with another size than it has as Xet.")
            return found.xet_file_data is not None

    def _download_by_hub(self, file: File, part: Path) -> None:
        """Let the hub's own downloader fill `part`, in a work folder, because it removes an older file first."""
        hub, listing = client(), self.listing
        if part.exists() and part.stat().st_size == file.size:
            return  # complete, but interrupted before the check
        part.unlink(missing_ok=True)  # useless here, and its space was counted as free
        hub.utils.disable_progress_bars()
        self._with_hub = file
        try:
            with _no_file_above(file.size + BESIDE_BYTES):
                came = hub.hf_hub_download(
                    listing.repo,
                    file.name,
                    repo_type=listing.kind,
                    revision=listing.commit,
                    local_dir=self._work_folder(file),
                )
            Path(came).replace(part)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, hub.errors.LocalEntryNotFoundError) else None
            raise self._hubs_own_error(file, error if cause is None else cause) from error
        finally:
            self._with_hub = None
            shutil.rmtree(self.folder / WORK_FOLDER, ignore_errors=True)

    def _hubs_own_error(self, file: File, error: BaseException) -> HubError:
        """The error of the hub's own downloader, with the remedy."""
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

    def _work_folder(self, file: File) -> Path:
        return self.folder / WORK_FOLDER / file.digest[:12]

    def _is_there(self, file: File, record: dict[str, list[object]], *, verify: bool) -> bool:
        path = self.folder / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        if not verify and record.get(file.name) == _identity_of(path, file):
            return True
        if not file.is_of(path):
            return False
        self._record_hash(file)
        return True

    def _record_hash(self, file: File) -> None:
        with self._writing:
            _write_record(
                self.folder, _record_of(self.folder) | {file.name: _identity_of(self.folder / file.name, file)}
            )


@contextlib.contextmanager
def _no_file_above(size: int) -> Iterator[None]:
    """Within the block, no file of this process grows beyond `size`: writing fails."""
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


def _map_interruptible(
    threads: ThreadPoolExecutor, function: Callable[[File], _T], files: Sequence[File]
) -> Iterator[_T]:
    """As the pool's `map`, but short waits, so that Ctrl-C is noticed soon: during an endless wait it may not be."""
    for future in [threads.submit(function, file) for file in files]:
        while not wait((future,), HEEDS_CTRL_C_S).done:
            pass
        yield future.result()


def _identity_of(path: Path, file: File) -> list[object]:
    """The identity of a hashed file: digest, size and modification time."""
    stat = path.stat()
    return [file.digest, stat.st_size, stat.st_mtime_ns]
