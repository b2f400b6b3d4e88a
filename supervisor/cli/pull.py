"""`llmux pull`: the files that the configuration's models name, from the hub to where the models look for them.

So with the kernels that their workers will load on a GPU, which follow from how a model's weights are quantised.
Everything is looked at before anything is fetched, so that what is to come, and whether there is room for it, is known.
Repositories are independent: one that can't be had doesn't keep the others from coming.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from runtimes.adapters.hub_kernels import UsesKernels, build_of, cache
from runtimes.base import Source
from runtimes.registry import REGISTRY
from runtimes.shared.kernel import Kernel
from supervisor.catalog import Catalog, load, sources
from supervisor.catalog.catalog import CatalogModel
from supervisor.cli import show
from supervisor.core.types import ModelId
from supervisor.errors import LlmuxError, NotFoundError
from supervisor.io import hub, hub_download, hub_kernels, venvs

Echo = Callable[[str], None]
Row = dict[str, object]


class PullError(LlmuxError):
    """Not everything came; `detail` says what didn't, and why."""

    code = "pull_failed"


@dataclass
class Want:
    """One repository for one folder, and the models that need it. Of a kernel, `folder` is the cache that it goes to."""

    source: Source
    folder: Path
    models: list[CatalogModel]
    kernel: Kernel | None = None
    copy: hub_download.Copy | None = None
    missing: list[hub.File] = field(default_factory=list)
    problem: str | None = None

    @property
    def files(self) -> tuple[hub.File, ...]:
        """All that is wanted of it, as far as the hub has said."""
        return self.copy.listing.files if self.copy is not None else ()

    def still_bytes(self) -> int:
        """What has to come yet."""
        copy = self.copy
        return sum(file.size - copy.size_there(file) for file in self.missing) if copy is not None else 0

    def row(self) -> Row:
        """For a table, and for machines."""
        missing = {file.name for file in self.missing}
        return {
            "models": [str(model.id) for model in self.models],
            "kind": "model" if self.kernel is None else "kernel",
            "repo": self.source.repo,
            "revision": self.source.revision,
            "commit": self.copy.listing.commit if self.copy is not None else None,
            "gated": self.copy.listing.gated if self.copy is not None else None,
            "folder": str(self.folder),
            "size_bytes": sum(file.size for file in self.files),
            "missing_bytes": self.still_bytes(),
            "files": [
                {"name": file.name, "size_bytes": file.size, "digest": file.digest, "missing": file.name in missing}
                for file in self.files
            ],
            "problem": self.problem,
        }


def wants(catalog: Catalog, names: Sequence[str], *, verify: bool = False) -> list[Want]:
    """What these models need, or all that have a source; virtual names stand for their models. Blocks on the hub.

    Each is compared with what is there; what fails is kept in its `problem`.
    Raises NotFoundError for a name that isn't there, or a model for which nothing can be fetched; HubError where the hub's
    client can't be loaded.
    """
    models = _named(catalog, names)
    if models:
        hub.client()  # without it nothing can be looked at
    found: dict[tuple[str, str, Path], Want] = {}
    of_model: dict[ModelId, Want] = {}
    for model in models:
        if (source := model.config.source) is None:
            continue
        folder = sources.folder(source, model.config, catalog.server.models_dir)
        want = found.setdefault((source.repo, source.revision, folder), Want(source, folder, []))
        want.source = _both(want.source, source)
        want.models.append(model)
        of_model[model.id] = want
    for want in found.values():
        _look(want, functools.partial(hub.look, want.source), lambda want, _listing: want.folder, verify=verify)
    kernels: dict[tuple[Kernel, Path], Want] = {}
    for model in models:
        for kernel in _kernels(model, of_model.get(model.id)):
            folder = cache(catalog.server.runtimes_dir, model.config.env)
            source = Source(repo=kernel.repo, revision=kernel.branch)
            kernels.setdefault((kernel, folder), Want(source, folder, [], kernel)).models.append(model)
    for (kernel, _), want in kernels.items():
        environment = venvs.installed(want.models[0].config.runtime, catalog.server.runtimes_dir)
        build = build_of(environment.packages if environment is not None else ())
        _look(
            want,
            functools.partial(hub_kernels.look, kernel, build),
            lambda want, listing: hub_kernels.snapshot(want.folder, listing),
            verify=verify,
        )
    return [*found.values(), *kernels.values()]


def _look(
    want: Want, ask: Callable[[], hub.Listing], place: Callable[[Want, hub.Listing], Path], *, verify: bool
) -> None:
    try:
        listing = ask()
        copy = hub_download.Copy(listing, place(want, listing))
        want.missing = copy.missing(verify=verify)
        want.copy = copy
    except hub.HubError as error:
        want.problem = str(error)
    except OSError as error:
        want.problem = f"{want.source.repo}: {error}"


def _kernels(model: CatalogModel, want: Want | None) -> tuple[Kernel, ...]:
    """Those that its worker will load; a problem with the file that tells is kept with the model's own."""
    adapter = REGISTRY.get(model.config.runtime)
    if not isinstance(adapter, UsesKernels):
        return ()
    try:
        return adapter.kernels(model.config, functools.partial(_described, model, want))
    except (hub.HubError, OSError, ValueError) as error:
        if want is not None and want.problem is None:
            want.problem = str(error)
        return ()


def _described(model: CatalogModel, want: Want | None) -> Mapping[str, JsonValue]:
    """The model's config.json: from the hub where it has still to come. Empty without one."""
    if want is not None and want.copy is not None:
        for file in want.missing:
            if file.name == "config.json":
                return _object(hub.content(want.copy.listing, file))
    path = getattr(model.config, "path", None)
    if isinstance(path, Path) and (path / "config.json").is_file():
        return _object((path / "config.json").read_bytes())
    return {}


def _object(text: bytes) -> Mapping[str, JsonValue]:
    value = json.loads(text)
    return value if isinstance(value, dict) else {}


def make_room(wanted: Sequence[Want]) -> None:
    """Remove what earlier pulls left and nobody can use. Raises PullError where the disk is too small all the same."""
    needs: dict[int, tuple[Path, int]] = {}
    for want in wanted:
        if want.copy is not None:
            want.copy.clear()
        there = next(path for path in (want.folder, *want.folder.absolute().parents) if path.exists())
        disk = there.stat().st_dev
        needs[disk] = (there, needs.get(disk, (there, 0))[1] + want.still_bytes())
    for path, needed in needs.values():
        free = shutil.disk_usage(path).free
        if needed > free:
            raise PullError(
                f"{show.mib(needed >> 20)} are to come, but the disk of {path} has {show.mib(free >> 20)} free: "
                "make room, set server.models_dir, or name the models to pull."
            )


def fetch(wanted: Sequence[Want], echo: Echo) -> None:
    """Get what is missing, with a bar on a terminal. Raises PullError when all have been tried and some didn't come."""
    total = sum(want.still_bytes() for want in wanted)
    began, current = time.monotonic(), [""]

    def frame() -> show.Row:
        left = sum(want.still_bytes() for want in wanted)
        seconds = max(0.1, time.monotonic() - began)
        rate = (total - left) / seconds
        eta = f"{show.duration(left / rate)} left" if rate > 0 else ""
        amount = f"{show.mib(total - left >> 20)} of {show.mib(total >> 20)}"
        return (show.Bar((total - left) / max(1, total)), amount, f"{rate / 1e6:.1f} MB/s", eta, current[0])

    telling = threading.Lock()

    def tell(line: str) -> None:
        with telling:
            current[0] = line
            if not sys.stderr.isatty():
                echo(line)

    with show.progress(frame):
        for want in wanted:
            if want.problem is None:
                _fetch(want, tell)
    if failed := [
        f"{', '.join(str(model.id) for model in want.models)}: {want.problem}" for want in wanted if want.problem
    ]:
        raise PullError(f"{len(failed)} of {len(wanted)} could not be fetched:", detail=tuple(failed))


def _fetch(want: Want, tell: Echo) -> None:
    assert want.copy is not None
    try:
        if want.missing:
            tell(f"{want.source.repo} to {want.folder}")
            want.copy.fetch(want.missing, tell)
            want.missing = []
        if want.kernel is not None:
            hub_kernels.publish(want.folder, want.kernel, want.copy.listing)
            return
        for model in want.models:
            path = getattr(model.config, "path", None)
            if isinstance(path, Path) and not path.exists():
                want.problem = f"{path} isn't among the files that came; mend `path` or `source.files`"
    except hub.HubError as error:
        want.problem = str(error)
    except OSError as error:
        want.problem = f"{want.source.repo}: {error}"


def table_of(wanted: Sequence[Want]) -> list[show.Table | str]:
    """For people: a line each, the sum, and what couldn't be looked at."""
    lines: list[show.Row] = [("MODELS", "REPOSITORY", "FILES", "SIZE", "TO GET")]
    for want in wanted:
        size = sum(file.size for file in want.files)
        names = ", ".join(str(model.id) for model in want.models)
        repo = want.source.repo + (" (gated)" if want.copy is not None and want.copy.listing.gated else "")
        repo += f" (kernel, {want.source.revision})" if want.kernel is not None else ""
        if want.problem is not None:
            lines.append((names, repo, "-", "-", "?"))
        else:
            left = want.still_bytes()
            lines.append(
                (names, repo, str(len(want.files)), show.mib(_mib(size)), show.mib(_mib(left)) if want.missing else "-")
            )
    size = sum(file.size for want in wanted for file in want.files)
    left = sum(want.still_bytes() for want in wanted)
    told = [want.problem for want in wanted if want.problem is not None]
    total = f"{show.mib(_mib(size))} in all, {show.mib(_mib(left))} to get"
    if unseen := sum(want.copy is None for want in wanted):
        total = f"{total}, beside {unseen} of {len(wanted)} that could not be looked at"
        if unseen == len(wanted):
            total = "No repository could be looked at"
    return [show.Table(lines), *told, f"{total}."]


def catalog_of(config: Path | None) -> Catalog:
    """The configuration, whose files needn't be there yet."""
    return load(config, check_files=False)


def _named(catalog: Catalog, names: Sequence[str]) -> list[CatalogModel]:
    if not names:
        return [model for model in catalog.models.values() if _fetchable(model)]
    found: list[CatalogModel] = []
    for name in names:
        virtual = catalog.virtual.get(name)
        model = virtual.model if virtual is not None else catalog.models.get(ModelId(name))
        if model is None:
            raise NotFoundError(f"There is no model {name!r} in the configuration.")
        if not _fetchable(model):
            raise NotFoundError(f"The model {name!r} names no source: its files are what you put there.")
        found.append(model)
    return list({model.id: model for model in found}.values())


def _fetchable(model: CatalogModel) -> bool:
    """Has it a source, or kernels though its files are what somebody put there?"""
    return model.config.source is not None or bool(_kernels(model, None))


def _both(one: Source, other: Source) -> Source:
    """All files that either names; naming none means all."""
    files = list(dict.fromkeys([*one.files, *other.files])) if one.files and other.files else []
    return one.model_copy(update={"files": files})


def _mib(size: int) -> int:
    return -(-size // (1 << 20))
