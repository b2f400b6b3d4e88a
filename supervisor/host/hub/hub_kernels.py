"""Kernels from the hub, put where a worker's package `kernels` looks for them (runtimes/adapters/hub_kernels.py).

The layout is that of the hub's own cache, which the package reads when offline. The package finds a version only through its
file in `refs`, which is written last: an incomplete version is never used, and an older commit serves until the next one is
complete. Files are in the snapshot itself rather than behind links, which makes no difference to the package.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from runtimes.adapters.hub_kernels import Build, suits
from runtimes.shared.kernel import Kernel
from supervisor.host.hub import hub
from supervisor.host.hub.download import File
from supervisor.host.store.files import replacing


def look(kernel: Kernel, build: Build) -> hub.Listing:
    """List the variants that an environment of this build can load. Raises HubError, also if there is none."""
    commit = _commit_of(kernel)
    found = []
    try:
        for page in hub.pages(
            f"kernels/{kernel.repo}/tree/{commit}/build", kernel.repo, kernel.branch, recursive="true"
        ):
            for entry in page:
                if entry["type"] == "file":
                    digest = entry["lfs"]["oid"] if entry.get("lfs") else entry["oid"]
                    found.append(hub.file_of(kernel.repo, entry["path"], entry["size"], digest))
    except (LookupError, TypeError, AttributeError) as error:
        raise hub.HubError(f"{kernel.repo}: the hub's listing of it can't be read; is it a model hub?") from error
    files = tuple(file for file in found if suits(_variant_of(file), build))
    if not files:
        raise hub.HubError(
            f"{kernel.repo}: {kernel.branch} has no build for {_describe_build(build)}; "
            f"there are: {', '.join(sorted({_variant_of(file) for file in found})) or 'none'}"
        )
    return hub.Listing(kernel.repo, commit, gated=False, files=files, kind="kernel")


def snapshot(cache: Path, listing: hub.Listing) -> Path:
    """The folder of the listing's files."""
    return _repo_folder(cache, listing.repo) / "snapshots" / listing.commit


def publish(cache: Path, kernel: Kernel, listing: hub.Listing) -> None:
    """Let workers use this commit, once its files are complete. Raises OSError."""
    ref = _repo_folder(cache, kernel.repo) / "refs" / kernel.branch
    ref.parent.mkdir(parents=True, exist_ok=True)
    with replacing(ref) as fresh:
        fresh.write_text(listing.commit, encoding="ascii")


def _commit_of(kernel: Kernel) -> str:
    """The commit that the package would use: a version is a branch, never a tag."""
    refs = next(hub.pages(f"kernels/{kernel.repo}/refs", kernel.repo, kernel.branch))
    try:
        commits = {branch["name"]: branch["targetCommit"] for branch in refs["branches"]}
    except (LookupError, TypeError) as error:
        raise hub.HubError(f"{kernel.repo}: the hub's listing of it can't be read; is it a model hub?") from error
    if kernel.branch not in commits:
        raise hub.HubError(
            f"{kernel.repo}: it has no branch {kernel.branch}; there are: {', '.join(commits) or 'none'}"
        )
    return hub.commit_of(kernel.repo, commits[kernel.branch])


def _repo_folder(cache: Path, repo: str) -> Path:
    return cache / f"kernels--{repo.replace('/', '--')}"


def _variant_of(file: File) -> str:
    parts = PurePosixPath(file.name).parts
    return parts[1] if len(parts) > 2 else ""


def _describe_build(build: Build) -> str:
    versions = (("torch", build.torch), ("CUDA", build.cuda))
    return ", ".join([*(f"{name} {v[0]}.{v[1]}" for name, v in versions if v is not None), build.machine])
