"""Kernels from the hub, put where a worker's package `kernels` looks for them (runtimes/adapters/hub_kernels.py).

The layout is that of the hub's own cache, which the package reads when it may not ask the hub. A version is found only
through its file in `refs`, which is written last: an incomplete one is never used, and an older commit serves until the
next one is complete. Files are in the snapshot itself rather than behind links, which makes no difference to the package.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from runtimes.adapters.hub_kernels import Build, suits
from runtimes.shared.kernel import Kernel
from supervisor.io import hub
from supervisor.io.files import replacing

if TYPE_CHECKING:
    from types import ModuleType


def look(kernel: Kernel, build: Build) -> hub.Listing:
    """List the variants that an environment of this build can load. Raises HubError, also where there is none."""
    client = hub.client()
    try:
        commit = _commit(client, kernel)
        tree = client.HfApi().list_repo_tree(kernel.repo, "build", recursive=True, revision=commit, repo_type="kernel")
        found = [
            hub.file_of(kernel.repo, file.path, file.size, file.lfs.sha256 if file.lfs is not None else file.blob_id)
            for file in tree
            if isinstance(file, client.hf_api.RepoFile)
        ]
    except Exception as error:
        raise hub.explained(error, kernel.repo, kernel.branch) from error
    files = tuple(file for file in found if suits(_variant(file), build))
    if not files:
        raise hub.HubError(
            f"{kernel.repo}: {kernel.branch} has no build for {_words(build)}; "
            f"there are: {', '.join(sorted({_variant(file) for file in found})) or 'none'}"
        )
    return hub.Listing(kernel.repo, commit, gated=False, files=files, kind="kernel")


def snapshot(cache: Path, listing: hub.Listing) -> Path:
    """The folder of its files."""
    return _folder(cache, listing.repo) / "snapshots" / listing.commit


def publish(cache: Path, kernel: Kernel, listing: hub.Listing) -> None:
    """Let workers use this commit, whose files are complete. Raises OSError."""
    ref = _folder(cache, kernel.repo) / "refs" / kernel.branch
    ref.parent.mkdir(parents=True, exist_ok=True)
    with replacing(ref) as fresh:
        fresh.write_text(listing.commit, encoding="ascii")


def _commit(client: ModuleType, kernel: Kernel) -> str:
    """As the package finds it: a version is a branch, never a tag."""
    branches = client.HfApi().list_repo_refs(kernel.repo, repo_type="kernel").branches
    commits = {branch.name: str(branch.target_commit) for branch in branches}
    if kernel.branch not in commits:
        raise hub.HubError(
            f"{kernel.repo}: it has no branch {kernel.branch}; there are: {', '.join(commits) or 'none'}"
        )
    return commits[kernel.branch]


def _folder(cache: Path, repo: str) -> Path:
    return cache / f"kernels--{repo.replace('/', '--')}"


def _variant(file: hub.File) -> str:
    parts = PurePosixPath(file.name).parts
    return parts[1] if len(parts) > 2 else ""


def _words(build: Build) -> str:
    versions = (("torch", build.torch), ("CUDA", build.cuda))
    return ", ".join([*(f"{name} {v[0]}.{v[1]}" for name, v in versions if v is not None), build.machine])
