"""Files of a model hub, fetched so that being cut off costs nothing.

The hub's own client says what a repository holds, knows where the hub and the person's token are (HF_ENDPOINT, HF_TOKEN,
HF_HOME) and moves the bytes. It keeps nothing of a download that was interrupted, though, so the files are kept here:

    <folder>/<file>                     whole: its size and hash are what the hub says
    <folder>/<file>.<hash>.part         what is there of it so far; the next attempt asks for the rest
    <folder>/.llmux-pull.json           what was hashed when, so that nothing is hashed twice

A repository is looked at once, at its revision of that moment; all files are of that commit.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import glob
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Final, Literal

from runtimes.base import Source
from supervisor.errors import LlmuxError

if TYPE_CHECKING:
    from types import ModuleType

RECORD: Final = ".llmux-pull.json"
LOCK: Final = ".llmux-pull.lock"
AT_ONCE: Final = 4
ATTEMPTS: Final = 5  # in a row that bring nothing
PASSING: Final = (408, 429)  # the client's fault only for a while
FIRST_PAUSE_S: Final = 0.1
TIMEOUT_S: Final = 30.0
CHUNK: Final = 1024 * 1024
EXTRA_REMEDY: Final = "pip install 'llmux-supervisor[hub]'"

# Beside safetensors that transformers can load: the same weights for other programs, and copies of other layouts.
OTHER_WEIGHTS: Final = (
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.onnx_data", "*.tflite", "*.gguf"),
    *("onnx/*", "openvino/*", "original/*", "metal/*", "coreml/*", "flax/*", "runs/*"),
)
SAFETENSORS: Final = ("model.safetensors", "model.safetensors.index.json")

Told = Callable[[str], None]


class HubError(LlmuxError):
    """The hub doesn't give it; says what to do."""

    code = "hub_unavailable"


@dataclass(frozen=True, slots=True)
class File:
    """A file of a repository. `digest` is sha256 of large files; of others git's, sha1 with a header."""

    name: str
    size: int
    digest: str

    def is_of(self, path: Path) -> bool:
        """Has the file there this content? Reads all of it."""
        if path.stat().st_size != self.size:
            return False
        with path.open("rb") as file:
            return self._fits(iter(lambda: file.read(CHUNK), b""))

    def is_content(self, content: bytes) -> bool:
        """Is it this?"""
        return len(content) == self.size and self._fits([content])

    def _fits(self, chunks: Iterable[bytes]) -> bool:
        large = len(self.digest) == 64
        hashed = hashlib.sha256() if large else hashlib.sha1(b"blob %d\0" % self.size)  # noqa: S324  # git's choice
        for chunk in chunks:
            hashed.update(chunk)
        return hashed.hexdigest() == self.digest


@dataclass(frozen=True, slots=True)
class Listing:
    """What is wanted of a repository, at one commit."""

    repo: str
    commit: str
    gated: bool
    files: tuple[File, ...]
    kind: Literal["model", "kernel"] = "model"


def content(listing: Listing, file: File) -> bytes:
    """A small file, without keeping it. Blocks. Raises HubError."""
    hub = client()
    url = hub.hf_hub_url(listing.repo, file.name, revision=listing.commit, repo_type=listing.kind)
    try:
        response = hub.utils.get_session().get(
            url, headers=hub.utils.build_hf_headers(), timeout=TIMEOUT_S, follow_redirects=True
        )
        hub.utils.hf_raise_for_status(response)
    except Exception as error:
        raise explained(error, listing.repo, listing.commit) from error
    if not file.is_content(response.content):
        raise HubError(f"{listing.repo}: {file.name} arrived with another hash than the hub says; try again.")
    return bytes(response.content)


def look(source: Source) -> Listing:
    """Ask the hub what the source names. Raises HubError."""
    hub = client()
    try:
        info = hub.HfApi().model_info(source.repo, revision=source.revision, files_metadata=True)
    except Exception as error:
        raise explained(error, source.repo, source.revision) from error
    found: dict[str, File] = {}
    for entry in info.siblings or ():
        digest = entry.lfs.sha256 if entry.lfs is not None else entry.blob_id
        if entry.size is None or digest is None or info.sha is None:
            raise HubError(
                f"{source.repo}: the hub doesn't tell size and hash of {entry.rfilename}; is it a model hub?"
            )
        found[entry.rfilename] = file_of(source.repo, entry.rfilename, entry.size, digest)
    wanted = _chosen(source, sorted(found))
    return Listing(source.repo, str(info.sha), bool(info.gated), tuple(found[name] for name in wanted))


def file_of(repo: str, name: str, size: int, digest: str) -> File:
    """A file that the hub lists. Raises HubError for a name that leads out of the folder."""
    place = PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts:
        raise HubError(f"{repo}: {name!r} is no name for a file below a folder; don't use it.")
    return File(name, size, digest)


class Copy:
    """The files of a listing in a folder: what is there, and how the rest gets there."""

    def __init__(self, listing: Listing, folder: Path) -> None:
        self.listing = listing
        self.folder = folder
        self._writing = threading.Lock()

    def missing(self, *, verify: bool = False) -> list[File]:
        """Files that aren't there whole. Hashes those that nobody hashed yet; with `verify`, all."""
        record = self._record()
        return [file for file in self.listing.files if not self._is_there(file, record, verify=verify)]

    def size_there(self, file: File) -> int:
        """How much of a file is there, whole or in part. Cheap."""
        for path in (self.folder / file.name, self._part(file)):
            with contextlib.suppress(OSError):
                return min(path.stat().st_size, file.size)
        return 0

    def fetch(self, files: Sequence[File], tell: Told) -> None:
        """Get these files, telling of each. Blocks. Raises HubError, or OSError; what came so far stays."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stop = threading.Event()
        with self._turn(tell) as waited, ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pull") as threads:
            if waited:  # whoever was at it before has most likely fetched them
                missing = self.missing(verify=True)
                files = [file for file in files if file in missing]
            try:
                for _ in threads.map(lambda file: self._fetch(file, tell, stop), files):
                    pass
            except BaseException:
                stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch(self, file: File, tell: Told, stop: threading.Event) -> None:
        path, part = self.folder / file.name, self._part(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        for again in (False, True):
            self._download(file, part, tell, stop)
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
        tell(f"{file.name}: {file.size} bytes, verified")

    def _download(self, file: File, part: Path, tell: Told, stop: threading.Event) -> None:
        """Fill `part` up to the file's size, however often the connection breaks, as long as something comes."""
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
                    if error.response.status_code < 500 and error.response.status_code not in PASSING:
                        raise explained(error, self.listing.repo, self.listing.commit) from error
                    problem = error
                except OSError:  # the disk's: the client's own are none
                    raise
                except Exception as error:  # noqa: BLE001  # however it broke: what has come is kept and checked
                    problem = error
                if (now := out.tell()) >= file.size:
                    break
                fruitless = 0 if now > there else fruitless + 1
                if fruitless == ATTEMPTS:
                    raise explained(problem, self.listing.repo, self.listing.commit) from problem
                tell(f"{file.name}: broken off at {now} of {file.size} bytes ({_line(problem)}); going on")
                stop.wait(min(FIRST_PAUSE_S * 2**fruitless, 5.0))

    def _read(self, file: File, out: BinaryIO, stop: threading.Event) -> None:
        """Ask for what is missing, and append it."""
        hub = client()
        there = out.tell()
        listing = self.listing
        url = hub.hf_hub_url(listing.repo, file.name, revision=listing.commit, repo_type=listing.kind)
        headers = {**hub.utils.build_hf_headers(), "Accept-Encoding": "identity"}
        if there:
            headers["Range"] = f"bytes={there}-"
        with hub.utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
            hub.utils.hf_raise_for_status(response)
            if there and response.status_code != HTTPStatus.PARTIAL_CONTENT:
                _empty(out)
            for chunk in response.iter_bytes():
                if stop.is_set():
                    raise InterruptedError
                out.write(chunk)

    @contextmanager
    def _turn(self, tell: Told) -> Iterator[bool]:
        """One at a time fills a folder; the kernel frees the lock of one that dies. Tells whether it had to wait."""
        waited = False
        with (self.folder / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                tell(f"{self.folder}: waiting for another pull to finish")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield waited

    def _part(self, file: File) -> Path:
        path = self.folder / file.name
        return path.with_name(f"{path.name}.{file.digest[:12]}.part")

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

    def _record(self) -> dict[str, list[object]]:
        try:
            record = json.loads((self.folder / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _remember(self, file: File) -> None:
        with self._writing:
            record = self._record() | {file.name: _mark(self.folder / file.name, file)}
            aside = self.folder / f"{RECORD}.{os.getpid()}"
            aside.write_text(json.dumps(record, indent=1), encoding="utf-8")
            aside.replace(self.folder / RECORD)


def _empty(out: BinaryIO) -> None:
    out.seek(0)
    out.truncate()


def client() -> ModuleType:
    """The hub's client. Raises HubError where it isn't installed."""
    try:
        import huggingface_hub  # noqa: PLC0415  # an extra; and it takes a second
        import huggingface_hub.errors  # noqa: PLC0415
        import huggingface_hub.utils  # noqa: PLC0415
    except ImportError as error:
        raise HubError(f"Fetching models needs the hub's client: {EXTRA_REMEDY}") from error
    return huggingface_hub


def _chosen(source: Source, names: Sequence[str]) -> list[str]:
    """The files that are wanted. Raises HubError for a pattern that fits none."""
    if source.files:
        chosen: list[str] = []
        for pattern in source.files:
            fitting = [name for name in names if name == pattern] or fnmatch.filter(names, pattern)
            if not fitting:
                there = ", ".join(names[:20]) + (" …" if len(names) > 20 else "")
                raise HubError(f"{source.repo}: no file fits {pattern!r}. There are: {there or 'none'}")
            chosen += fitting
        return list(dict.fromkeys(chosen))
    names = [name for name in names if name != ".gitattributes"]
    if any(name in SAFETENSORS for name in names):
        return [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in OTHER_WEIGHTS)]
    return names


def explained(error: Exception, repo: str, revision: str) -> HubError:
    """What it means for a person, and what to do."""
    hub = client()
    endpoint = hub.constants.ENDPOINT
    match error:
        case HubError():
            return error
        case hub.errors.GatedRepoError():
            text = f"it is gated: accept its terms at {endpoint}/{repo}, and set HF_TOKEN to a token of that account"
        case hub.errors.RevisionNotFoundError():
            text = f"it has no revision {revision!r}"
        case hub.errors.RepositoryNotFoundError():
            text = "there is no such repository, or it is private and HF_TOKEN isn't a token that may read it"
        case hub.errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            text = f"{endpoint} refuses it ({error.response.status_code}); HF_TOKEN must be a token that may read it"
        case hub.errors.OfflineModeIsEnabled():
            text = "HF_HUB_OFFLINE forbids asking the hub; unset it for this"
        case hub.errors.HfHubHTTPError():
            text = f"{endpoint} answers {error.response.status_code}; try again later: what has come is kept"
        case _:
            text = f"{endpoint} can't be reached ({_line(error)}); try again: what has come is kept"
    return HubError(f"{repo}: {text}")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _mark(path: Path, file: File) -> list[object]:
    """What tells that a file is the one that was hashed."""
    stat = path.stat()
    return [file.digest, stat.st_size, stat.st_mtime_ns]
