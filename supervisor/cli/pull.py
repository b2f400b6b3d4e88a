"""`llmux pull`: the files that the configuration's models name, from the hub to where the models look for them.

Everything is looked at before anything is fetched, so that what is to come, and whether there is room for it, is known.
Repositories are independent: one that can't be had doesn't keep the others from coming.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtimes.base import Source
from supervisor.catalog import Catalog, load, sources
from supervisor.catalog.catalog import CatalogModel
from supervisor.cli import show
from supervisor.core.types import ModelId
from supervisor.errors import LlmuxError, NotFoundError
from supervisor.io import hub

Echo = Callable[[str], None]
Row = dict[str, object]


class PullError(LlmuxError):
    """Not everything came; `detail` says what didn't, and why."""

    code = "pull_failed"


@dataclass
class Want:
    """One repository for one folder, and the models that need it."""

    source: Source
    folder: Path
    models: list[CatalogModel]
    copy: hub.Copy | None = None
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


def wants(catalog: Catalog, names: Sequence[str]) -> list[Want]:
    """What these models need, or all that have a source; virtual names stand for their models.

    Raises NotFoundError for a name that isn't there, or a model that names no source.
    """
    found: dict[tuple[str, str, Path], Want] = {}
    for model in _named(catalog, names):
        source = model.config.source
        assert source is not None
        folder = sources.folder(source, model.config, catalog.server.models_dir)
        want = found.setdefault((source.repo, source.revision, folder), Want(source, folder, []))
        want.source = _both(want.source, source)
        want.models.append(model)
    return list(found.values())


def look(wanted: Sequence[Want], *, verify: bool) -> None:
    """Ask the hub about each, and compare with what is there. Blocks; what fails is kept in `problem`."""
    for want in wanted:
        try:
            want.copy = hub.Copy(hub.look(want.source), want.folder)
            want.missing = want.copy.missing(verify=verify)
        except hub.HubError as error:
            want.problem = str(error)
        except OSError as error:
            want.problem = f"{want.source.repo}: {error}"


def check_room(wanted: Sequence[Want]) -> None:
    """Raises PullError where the disk is too small."""
    needs: dict[int, tuple[Path, int]] = {}
    for want in wanted:
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

    def frame() -> str:
        left = sum(want.still_bytes() for want in wanted)
        seconds = max(0.1, time.monotonic() - began)
        rate = (total - left) / seconds
        eta = f"  {show.duration(left / rate)} left" if rate > 0 else ""
        amount = f"{show.mib(total - left >> 20)} of {show.mib(total >> 20)}"
        return f"{show.bar((total - left) / max(1, total))}  {amount}  {rate / 1e6:.1f} MB/s{eta}  {current[0]}"

    telling = threading.Lock()

    def tell(line: str) -> None:
        with telling:
            current[0] = line
            if not sys.stderr.isatty():
                echo(line)

    with show.Progress(frame):
        for want in wanted:
            if want.problem is None and want.missing:
                _fetch(want, tell)
    if failed := [
        f"{', '.join(str(model.id) for model in want.models)}: {want.problem}" for want in wanted if want.problem
    ]:
        raise PullError(f"{len(failed)} of {len(wanted)} could not be fetched:", detail=tuple(failed))


def _fetch(want: Want, tell: Echo) -> None:
    assert want.copy is not None
    try:
        tell(f"{want.source.repo} to {want.folder}")
        want.copy.fetch(want.missing, tell)
        want.missing = []
        for model in want.models:
            path = getattr(model.config, "path", None)
            if isinstance(path, Path) and not path.exists():
                want.problem = f"{path} isn't among the files that came; mend `path` or `source.files`"
    except hub.HubError as error:
        want.problem = str(error)
    except OSError as error:
        want.problem = f"{want.source.repo}: {error}"


def table_of(wanted: Sequence[Want]) -> str:
    """For people: a line each, the sum, and what couldn't be looked at."""
    lines: list[Sequence[str]] = [("MODELS", "REPOSITORY", "FILES", "SIZE", "TO GET")]
    for want in wanted:
        size = sum(file.size for file in want.files)
        names = ", ".join(str(model.id) for model in want.models)
        repo = want.source.repo + (" (gated)" if want.copy is not None and want.copy.listing.gated else "")
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
    total = f"{show.mib(_mib(size))} in all, {show.mib(_mib(left))} to get."
    return "\n".join([show.table(lines, width=show.terminal_width()), *told, total])


def catalog_of(config: Path | None) -> Catalog:
    """The configuration, whose files needn't be there yet."""
    return load(config, check_files=False)


def _named(catalog: Catalog, names: Sequence[str]) -> list[CatalogModel]:
    if not names:
        return [model for model in catalog.models.values() if model.config.source is not None]
    found: list[CatalogModel] = []
    for name in names:
        virtual = catalog.virtual.get(name)
        model = virtual.model if virtual is not None else catalog.models.get(ModelId(name))
        if model is None:
            raise NotFoundError(f"There is no model {name!r} in the configuration.")
        if model.config.source is None:
            raise NotFoundError(f"The model {name!r} names no source: its files are what you put there.")
        found.append(model)
    return list({model.id: model for model in found}.values())


def _both(one: Source, other: Source) -> Source:
    """All files that either names; naming none means all."""
    files = list(dict.fromkeys([*one.files, *other.files])) if one.files and other.files else []
    return one.model_copy(update={"files": files})


def _mib(size: int) -> int:
    return -(-size // (1 << 20))
