"""`llmux pull`: fetch the files of the configuration's models from the hub into the folders where the models expect them.

Also the kernels that their workers will load on a GPU, which depend on the quantisation of a model's weights. All
repositories are listed before anything is fetched, so that the size is known and the disk can be checked.
Repositories are independent: when one fails, the others are still fetched.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from runtimes.adapters.hub_kernels import build_of, cache
from runtimes.model_config import Source
from runtimes.registry import REGISTRY
from runtimes.shared.kernel import Kernel
from supervisor.catalog import Catalog
from supervisor.catalog.catalog import CatalogModel
from supervisor.catalog.models import sources
from supervisor.cli import output
from supervisor.core.types import ModelId
from supervisor.errors import LlmuxError, NotFoundError
from supervisor.host.environments import venvs
from supervisor.host.hub import hub, hub_download, hub_kernels
from supervisor.host.hub.download import File, line_of

PROGRESS_INTERVAL_S: Final = 1.0

Echo = Callable[[str], None]
ShowAmount = Callable[[int, int], None]
Row = dict[str, object]


class PullError(LlmuxError):
    """Some files could not be fetched; `detail` lists them, with the reasons."""

    code = "pull_failed"


@dataclass
class Download:
    """One repository for one folder, and the models that need it. For a kernel, `folder` is its cache."""

    source: Source
    folder: Path
    models: list[CatalogModel]
    kernel: Kernel | None = None
    copy: hub_download.Copy | None = None
    missing: list[File] = field(default_factory=list)
    problem: str | None = None

    @property
    def files(self) -> tuple[File, ...]:
        """All wanted files of the repository; none while the hub has not answered."""
        return self.copy.listing.files if self.copy is not None else ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def still_bytes(self) -> int:
        copy = self.copy
        return sum(file.size - copy.size_there(file) for file in self.missing) if copy is not None else 0

    def compare(self, copy: hub_download.Copy, *, verify: bool) -> None:
        """Find the missing files of this copy. Raises OSError."""
        self.missing = copy.missing(verify=verify)
        self.copy = copy

    @contextmanager
    def keeping_problem(self) -> Iterator[None]:
        """Store a failure within the block as this download's problem."""
        try:
            yield
        except hub.HubError as error:
            self.problem = str(error)
        except OSError as error:
            self.problem = f"{self.source.repo}: {error}"

    def row(self) -> Row:
        missing = {file.name for file in self.missing}
        return {
            "models": [str(model.id) for model in self.models],
            "kind": "model" if self.kernel is None else "kernel",
            "repo": self.source.repo,
            "revision": self.source.revision,
            "commit": self.copy.listing.commit if self.copy is not None else None,
            "gated": self.copy.listing.gated if self.copy is not None else None,
            "folder": str(self.folder),
            "size_bytes": self.size_bytes,
            "missing_bytes": self.still_bytes(),
            "files": [
                {"name": file.name, "size_bytes": file.size, "digest": file.digest, "missing": file.name in missing}
                for file in self.files
            ],
            "problem": self.problem,
        }


def downloads(catalog: Catalog, names: Sequence[str], *, verify: bool = False) -> list[Download]:
    """The downloads of these models, or of all that have a source; virtual names stand for their models. Blocks on the hub.

    Each is compared with the local files; a download keeps a failure in `problem`.
    Raises NotFoundError for an unknown name, or a model without anything to fetch; HubError where the hub's client can't be
    loaded.
    """
    models = named(catalog, names)
    if models:
        hub.client()  # nothing works without it
    found: dict[tuple[str, str, Path], Download] = {}
    for model in models:
        if (source := model.config.source) is None:
            continue
        folder = sources.folder(source, model.config, catalog.server.models_dir)
        download = found.setdefault((source.repo, source.revision, folder), Download(source, folder, []))
        download.source = _merged_source(download.source, source)
        download.models.append(model)
    for download in found.values():
        with download.keeping_problem():
            download.compare(hub_download.Copy(hub.look(download.source), download.folder), verify=verify)
    kernels: dict[tuple[Kernel, Path], Download] = {}
    for model in models:
        for kernel in _kernels(model, next((one for one in found.values() if model in one.models), None)):
            folder = cache(catalog.server.runtimes_dir, model.config.env)
            source = Source(repo=kernel.repo, revision=kernel.branch)
            kernels.setdefault((kernel, folder), Download(source, folder, [], kernel)).models.append(model)
    for (kernel, _), download in kernels.items():
        environment = venvs.installed(download.models[0].config.runtime, catalog.server.runtimes_dir)
        build = build_of(environment.packages if environment is not None else ())
        with download.keeping_problem():
            listing = hub_kernels.look(kernel, build)
            copy = hub_download.Copy(listing, hub_kernels.snapshot(download.folder, listing))
            download.compare(copy, verify=verify)
    return [*found.values(), *kernels.values()]


def _kernels(model: CatalogModel, download: Download | None) -> tuple[Kernel, ...]:
    """The kernels that the model's worker will load; the model's download keeps a problem with config.json."""
    adapter = REGISTRY.get(model.config.runtime)
    try:
        return adapter.kernels(model.config, functools.partial(_model_config, model, download))
    except (hub.HubError, OSError, ValueError) as error:
        if download is not None and download.problem is None:
            download.problem = str(error)
        return ()


def _model_config(model: CatalogModel, download: Download | None) -> Mapping[str, JsonValue]:
    """The model's config.json, from the hub if it isn't fetched yet. Empty without one."""
    if download is not None and download.copy is not None:
        for file in download.missing:
            if file.name == "config.json":
                listing = download.copy.listing
                return _parse_object(hub.content(listing, file), f"{listing.repo}: its config.json")
    path = getattr(model.config, "path", None)
    if isinstance(path, Path) and (path / "config.json").is_file():
        return _parse_object((path / "config.json").read_bytes(), f"{path / 'config.json'}")
    return {}


def _parse_object(text: bytes, what: str) -> Mapping[str, JsonValue]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} can't be read ({line_of(error)})") from error
    return value if isinstance(value, dict) else {}


def make_room(wanted: Sequence[Download]) -> None:
    """Remove unusable leftovers of earlier pulls. Raises PullError where the disk is still too small."""
    needs: dict[int, tuple[Path, int]] = {}
    for download in wanted:
        if download.copy is not None:
            download.copy.clear()
        there = next(path for path in (download.folder, *download.folder.absolute().parents) if path.exists())
        disk = there.stat().st_dev
        needs[disk] = (there, needs.get(disk, (there, 0))[1] + download.still_bytes())
    for path, needed in needs.values():
        free = shutil.disk_usage(path).free
        if needed > free:
            raise PullError(
                f"{output.mib(needed >> 20)} are to come, but the disk of {path} has {output.mib(free >> 20)} free: "
                "make room, set server.models_dir, or name the models to pull."
            )


def end_with_stdin() -> None:
    """End this process and its children as soon as its standard input ends: then its parent has exited."""

    def read() -> None:
        while os.read(0, 4096):
            pass
        if os.getpgrp() == os.getpid():  # the leader of its group; else the group is its caller's
            os.killpg(0, signal.SIGKILL)
        os._exit(1)  # don't wait for download threads; fetched bytes stay

    threading.Thread(target=read, name="stdin", daemon=True).start()


def show_amount(done_bytes: int, total_bytes: int) -> None:
    """Print the progress as a line of JSON, for a program that reads it."""
    sys.stdout.write(json.dumps({"done_bytes": done_bytes, "total_bytes": total_bytes}) + "\n")
    sys.stdout.flush()


@contextmanager
def _showing_amount(show: ShowAmount | None, amount: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Call `show` with the amount that has arrived, within the block and at its end."""
    if show is None:
        yield
        return
    over = threading.Event()

    def look() -> None:
        while not over.wait(PROGRESS_INTERVAL_S):
            show(*amount())

    show(*amount())
    looking = threading.Thread(target=look, name="amount", daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
        show(*amount())


def fetch(wanted: Sequence[Download], echo: Echo, show_amount: ShowAmount | None = None) -> None:
    """Fetch all missing files, with a bar on a terminal. Tries all, then raises PullError if any failed.

    `show_amount` gets the present and the final number of bytes, each second.
    """
    total = sum(download.still_bytes() for download in wanted)
    began, current = time.monotonic(), [""]

    def frame() -> output.Row:
        left = sum(download.still_bytes() for download in wanted)
        seconds = max(0.1, time.monotonic() - began)
        rate = (total - left) / seconds
        eta = f"{output.duration(left / rate)} left" if rate > 0 else ""
        amount = f"{output.mib(total - left >> 20)} of {output.mib(total >> 20)}"
        return (output.Bar((total - left) / max(1, total)), amount, f"{rate / 1e6:.1f} MB/s", eta, current[0])

    def print_line(line: str) -> None:
        current[0] = line
        if not sys.stderr.isatty():
            echo(line)

    def amount() -> tuple[int, int]:
        size = sum(download.size_bytes for download in wanted)
        return size - sum(download.still_bytes() for download in wanted), size

    with output.progress(frame), _showing_amount(show_amount, amount):
        for download in wanted:
            if download.problem is None:
                _fetch_download(download, print_line)
    if failed := [
        f"{', '.join(str(model.id) for model in download.models)}: {download.problem}"
        for download in wanted
        if download.problem
    ]:
        raise PullError(f"{len(failed)} of {len(wanted)} could not be fetched:", detail=tuple(failed))


def _fetch_download(download: Download, print_line: Echo) -> None:
    assert download.copy is not None
    with download.keeping_problem():
        if download.missing:
            print_line(f"{download.source.repo} to {download.folder}")
            download.copy.fetch(download.missing, print_line)
            download.missing = []
        if download.kernel is not None:
            hub_kernels.publish(download.folder, download.kernel, download.copy.listing)
            return
        for model in download.models:
            path = getattr(model.config, "path", None)
            if isinstance(path, Path) and not path.exists():
                download.problem = f"{path} isn't among the files that came; correct `path` or `source.files`"


def table_of(wanted: Sequence[Download]) -> list[output.Table | str]:
    lines: list[output.Row] = [("MODELS", "REPOSITORY", "FILES", "SIZE", "TO GET")]
    for download in wanted:
        names = ", ".join(str(model.id) for model in download.models)
        repo = download.source.repo + (" (gated)" if download.copy is not None and download.copy.listing.gated else "")
        repo += f" (kernel, {download.source.revision})" if download.kernel is not None else ""
        if download.problem is not None:
            lines.append((names, repo, "-", "-", "?"))
        else:
            to_get = _size_text(download.still_bytes()) if download.missing else "-"
            lines.append((names, repo, str(len(download.files)), _size_text(download.size_bytes), to_get))
    problems = [download.problem for download in wanted if download.problem is not None]
    size = sum(download.size_bytes for download in wanted)
    left = sum(download.still_bytes() for download in wanted)
    total = f"{_size_text(size)} total, {_size_text(left)} to get"
    if unseen := sum(download.copy is None for download in wanted):
        total = f"{total}, beside {unseen} of {len(wanted)} that could not be looked at"
        if unseen == len(wanted):
            total = "No repository could be looked at"
    return [output.Table(lines), *problems, f"{total}."]


def named(catalog: Catalog, names: Sequence[str]) -> list[CatalogModel]:
    """The models of these names, else all models with something to fetch. Raises NotFoundError, as `downloads`."""
    if not names:
        return [model for model in catalog.models.values() if _fetchable(model)]
    found: list[CatalogModel] = []
    for name in names:
        virtual = catalog.virtual.get(name)
        model = virtual.model if virtual is not None else catalog.models.get(ModelId(name))
        if model is None:
            raise NotFoundError(f"There is no model {name!r} in the configuration. One of the hub: llmux add ORG/REPO")
        if not _fetchable(model):
            raise NotFoundError(f"The model {name!r} names no source: its files are what you put there.")
        found.append(model)
    return list({model.id: model for model in found}.values())


def _fetchable(model: CatalogModel) -> bool:
    return model.config.source is not None or bool(_kernels(model, None))


def _merged_source(one: Source, other: Source) -> Source:
    """A source with the files of both; a source without files means all files."""
    files = list(dict.fromkeys([*one.files, *other.files])) if one.files and other.files else []
    return one.model_copy(update={"files": files})


def _size_text(size: int) -> str:
    return output.mib(-(-size // (1 << 20)))
