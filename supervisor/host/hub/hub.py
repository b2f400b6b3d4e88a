"""Listings of a model hub: the files of a repository at one commit, with their sizes and hashes.

The hub's client knows the endpoint and the user's token (HF_ENDPOINT, HF_TOKEN, HF_HOME). A repository is listed once, and
all files are of its commit at that moment. host/hub/hub_download.py fetches the files.

A hub isn't trusted: its answers are read up to a limit, and its file names stay within the model's folder.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote, urljoin

from runtimes.model_config import Source
from supervisor.errors import LlmuxError
from supervisor.host.hub.download import TIMEOUT_S, File, Origin, Response, line_of, read_up_to

if TYPE_CHECKING:
    from types import ModuleType

LISTING_BYTES: Final = 32 << 20
"""The limit for all pages of a listing together, each counted as at least `PAGE_BYTES`: some 100 000 files."""
PAGE_BYTES: Final = 64 * 1024
DESCRIPTION_BYTES: Final = 16 << 20
"""The limit for a file that `content` reads."""
OWN: Final = ".llmux-pull"
"""The names of llmux's own files in a model's folder begin with this."""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DIGEST: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
REFUSED: Final = (401, 403)
PASSING: Final = (408, 429, *range(500, 600))  # worth another attempt

# Not needed in addition to safetensors: the same weights for other programs, and in other layouts.
OTHER_WEIGHTS: Final = (
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.onnx_data", "*.tflite", "*.gguf"),
    *("onnx/*", "openvino/*", "original/*", "metal/*", "coreml/*", "flax/*", "runs/*"),
)
SAFETENSORS: Final = ("model.safetensors", "model.safetensors.index.json")


class HubError(LlmuxError):
    """The hub doesn't serve a file; the message has the remedy."""

    code = "hub_unavailable"


@dataclass(frozen=True, slots=True)
class Listing:
    """The wanted files of a repository, at one commit."""

    repo: str
    commit: str
    gated: bool
    files: tuple[File, ...]
    kind: Literal["model", "kernel"] = "model"

    def url(self, file: File) -> str:
        """The file's address at the hub."""
        return str(client().hf_hub_url(self.repo, file.name, revision=self.commit, repo_type=self.kind))

    def origin(self, file: File) -> Origin:
        """The origin of the file for a downloader. Other hosts, after a redirect, don't get the user's token."""
        ask = functools.partial(answer, self.url(file))
        return Origin(ask, PASSING, lambda error: explained(error, self.repo, self.commit))


@contextlib.contextmanager
def answer(
    url: str, headers: Mapping[str, str] | None = None, params: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """A response with an unread body. Raises the client's errors, which hold nothing of the body."""
    hub = client()
    with hub.utils.get_session().stream(
        "GET",
        url,
        params=params or None,  # an empty dict would remove the query of the URL
        headers={**hub.utils.build_hf_headers(), **(headers or {})},
        timeout=TIMEOUT_S,
        follow_redirects=True,
    ) as response:
        if response.is_error:
            response.close()
        hub.utils.hf_raise_for_status(response)
        yield response


def pages(path: str, repo: str, revision: str, **params: str) -> Iterator[Any]:
    """The pages of an answer of the hub's API, as JSON values. Blocks. Raises HubError."""
    endpoint = client().constants.ENDPOINT
    url, left = f"{endpoint}/api/{path}", LISTING_BYTES
    try:
        while url:
            with answer(url, params=params) as response:
                text = _read_all(response, left, f"{repo}: the hub's listing of it")
                following = response.links.get("next", {}).get("url", "")
            yield json.loads(text)
            left -= max(len(text), PAGE_BYTES)
            url, params = urljoin(url, following) if following else "", {}
            if not url.startswith(f"{endpoint}/"):  # no other host gets the user's token
                url = ""
    except RecursionError as error:
        raise HubError(f"{repo}: the hub's listing of it can't be read; is it a model hub?") from error
    except Exception as error:
        raise explained(error, repo, revision) from error


def content(listing: Listing, file: File) -> bytes:
    """The content of a small file, not kept on disk. Blocks. Raises HubError."""
    what = f"{listing.repo}: {file.name}"
    try:
        with answer(listing.url(file)) as response:
            found = _read_all(response, min(file.size, DESCRIPTION_BYTES), what)
    except Exception as error:
        raise explained(error, listing.repo, listing.commit) from error
    if not file.is_content(BytesIO(found)):
        raise HubError(f"{what} arrived with another hash than the hub says; try again.")
    return found


def head(listing: Listing, file: File, size: int) -> bytes:
    """The first `size` bytes of a file, or fewer. Blocks. Raises HubError."""
    headers = {"Accept-Encoding": "identity", "Range": f"bytes=0-{size - 1}"}
    try:
        with answer(listing.url(file), headers) as response:
            return read_up_to(response, size)  # a hub without ranges sends the whole file
    except Exception as error:
        raise explained(error, listing.repo, listing.commit) from error


def look(source: Source) -> Listing:
    """List the files that the source names. Blocks. Raises HubError."""
    repo, found = source.repo, dict[str, File]()
    info = next(pages(f"models/{repo}/revision/{quote(source.revision, safe='')}", repo, source.revision, blobs="true"))
    try:
        for entry in info["siblings"]:
            name, lfs = entry["rfilename"], entry.get("lfs")
            digest = entry.get("blobId") if lfs is None else lfs["sha256"]
            found[name] = file_of(repo, name, entry.get("size"), digest)
        gated, commit = bool(info.get("gated")), commit_of(repo, info["sha"])
    except (LookupError, TypeError, AttributeError) as error:
        raise HubError(f"{repo}: the hub's listing of it can't be read; is it a model hub?") from error
    return Listing(repo, commit, gated, tuple(found[name] for name in _select_files(source, sorted(found))))


def commit_of(repo: str, commit: object) -> str:
    """Check a commit that the hub names. Raises HubError for anything else, which could lead out of a folder."""
    if isinstance(commit, str) and _COMMIT.fullmatch(commit):
        return commit
    raise HubError(f"{repo}: the hub doesn't tell its commit; is it a model hub?")


def file_of(repo: str, name: object, size: object, digest: object) -> File:
    """Check a file that the hub lists.

    Raises HubError for a name that leads out of the folder, that llmux reserves, or that isn't printable.
    """
    place = PurePosixPath(name if isinstance(name, str) else "")
    is_own = str(place).startswith(OWN)
    is_outside = not place.name or place.is_absolute() or ".." in place.parts
    if not isinstance(name, str) or str(place) != name or is_outside or is_own or not name.isprintable():
        raise HubError(f"{repo}: {name!r} is no name for a file below a folder; don't use it.")
    if type(size) is not int or size < 0 or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise HubError(f"{repo}: the hub doesn't tell size and hash of {name}; is it a model hub?")
    return File(name, size, digest)


def _read_all(response: Response, size: int, what: str) -> bytes:
    """The body of an answer. Raises HubError if it is longer than `size`."""
    found = read_up_to(response, size + 1)
    if len(found) > size:
        raise HubError(f"{what} is longer than {size} bytes; don't use it.")
    return found


def client() -> ModuleType:
    """The hub's client library. Raises HubError if it can't be loaded."""
    try:
        import huggingface_hub  # noqa: PLC0415  # loading it takes longer than most commands
        import huggingface_hub.constants  # noqa: PLC0415
        import huggingface_hub.errors  # noqa: PLC0415
        import huggingface_hub.utils  # noqa: PLC0415
    except ImportError as error:
        raise HubError(
            f"The hub's client can't be loaded ({error}): reinstall llmux, the way it was installed before; "
            "huggingface-hub comes along."
        ) from error
    return huggingface_hub


def _select_files(source: Source, names: Sequence[str]) -> list[str]:
    """The wanted files. Raises HubError for a pattern without a match."""
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
