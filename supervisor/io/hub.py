"""What a model hub has: the files of a repository at one commit, with their sizes and hashes.

The hub's client knows the endpoint and the person's token (HF_ENDPOINT, HF_TOKEN, HF_HOME). A repository is listed once,
and all files are of the commit that it had then. io/hub_download.py gets them.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Literal

from runtimes.model_config import Source
from supervisor.errors import LlmuxError

if TYPE_CHECKING:
    from types import ModuleType

TIMEOUT_S: Final = 30.0
REFUSED: Final = (401, 403)

# Not needed beside safetensors: the same weights for other programs, and in other layouts.
OTHER_WEIGHTS: Final = (
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.onnx_data", "*.tflite", "*.gguf"),
    *("onnx/*", "openvino/*", "original/*", "metal/*", "coreml/*", "flax/*", "runs/*"),
)
SAFETENSORS: Final = ("model.safetensors", "model.safetensors.index.json")


class HubError(LlmuxError):
    """The hub doesn't give a file; the message has the remedy."""

    code = "hub_unavailable"


@dataclass(frozen=True, slots=True)
class File:
    """A file of a repository. `digest` is sha256 for large files, else git's: sha1 with a header."""

    name: str
    size: int
    digest: str

    @property
    def is_large(self) -> bool:
        """Does git only point to it?"""
        return len(self.digest) == 64

    def is_of(self, path: Path) -> bool:
        """Does the file there have this content? Reads all of it."""
        with path.open("rb") as file:
            return path.stat().st_size == self.size and self.is_content(file)

    def is_content(self, stream: BufferedReader | BytesIO) -> bool:
        """Does it have this content?"""
        header = b"blob %d\0" % self.size
        hashed = hashlib.sha256() if self.is_large else hashlib.sha1(header)  # noqa: S324  # git's choice
        return hashlib.file_digest(stream, lambda: hashed).hexdigest() == self.digest


@dataclass(frozen=True, slots=True)
class Listing:
    """The wanted files of a repository, at one commit."""

    repo: str
    commit: str
    gated: bool
    files: tuple[File, ...]
    kind: Literal["model", "kernel"] = "model"

    def url(self, file: File) -> str:
        """Its address at the hub."""
        return str(client().hf_hub_url(self.repo, file.name, revision=self.commit, repo_type=self.kind))


def content(listing: Listing, file: File) -> bytes:
    """A small file, not kept. Blocks. Raises HubError."""
    hub = client()
    try:
        response = hub.utils.get_session().get(
            listing.url(file), headers=hub.utils.build_hf_headers(), timeout=TIMEOUT_S, follow_redirects=True
        )
        hub.utils.hf_raise_for_status(response)
    except Exception as error:
        raise explained(error, listing.repo, listing.commit) from error
    if not file.is_content(BytesIO(response.content)):
        raise HubError(f"{listing.repo}: {file.name} arrived with another hash than the hub says; try again.")
    return bytes(response.content)


def head(listing: Listing, file: File, size: int) -> bytes:
    """The first bytes of a file, at most so many. Blocks. Raises HubError."""
    hub, found = client(), bytearray()
    headers = {**hub.utils.build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes=0-{size - 1}"}
    try:
        with hub.utils.get_session().stream(
            "GET", listing.url(file), headers=headers, timeout=TIMEOUT_S, follow_redirects=True
        ) as response:
            hub.utils.hf_raise_for_status(response)
            for chunk in response.iter_bytes():
                found += chunk
                if len(found) >= size:  # a hub that knows no ranges sends it all
                    break
    except Exception as error:
        raise explained(error, listing.repo, listing.commit) from error
    return bytes(found[:size])


def look(source: Source) -> Listing:
    """List what the source names. Blocks. Raises HubError."""
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
    """A file that the hub lists. Raises HubError for a name that leads out of the folder, or that nobody can read."""
    place = PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts or not name.isprintable():
        raise HubError(f"{repo}: {name!r} is no name for a file below a folder; don't use it.")
    return File(name, size, digest)


def client() -> ModuleType:
    """The hub's client. Raises HubError where it can't be loaded."""
    try:
        import huggingface_hub  # noqa: PLC0415  # loading it takes longer than most commands
        import huggingface_hub.errors  # noqa: PLC0415
        import huggingface_hub.utils  # noqa: PLC0415
    except ImportError as error:
        raise HubError(
            f"The hub's client can't be loaded ({error}): reinstall llmux, the way it was installed before; "
            "huggingface-hub comes along."
        ) from error
    return huggingface_hub


def _chosen(source: Source, names: Sequence[str]) -> list[str]:
    """The wanted files. Raises HubError for a pattern that fits none."""
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


def explained(error: BaseException, repo: str, revision: str) -> HubError:
    """The error with its remedy, for a person."""
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
        case hub.errors.HfHubHTTPError() if error.response.status_code in REFUSED:
            text = f"{endpoint} refuses it ({error.response.status_code}); HF_TOKEN must be a token that may read it"
        case hub.errors.OfflineModeIsEnabled():
            text = "HF_HUB_OFFLINE forbids asking the hub; unset it for this"
        case hub.errors.HfHubHTTPError():
            text = f"{endpoint} answers {error.response.status_code}; try again later: what has come is kept"
        case _:
            text = f"{endpoint} can't be reached ({line_of(error)}); try again: what has come is kept"
    return HubError(f"{repo}: {text}")


def line_of(error: BaseException) -> str:
    """The first line: what went wrong, without advice."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
