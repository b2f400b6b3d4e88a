"""`llmux remove`: take a model out of the configuration, and the files that were pulled for it from the disk."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator
from pathlib import Path

from supervisor.catalog import Catalog, load_text, sources
from supervisor.catalog.catalog import CatalogModel
from supervisor.catalog.edit import without_entry
from supervisor.cli.adding import Target
from supervisor.core.types import ModelId
from supervisor.errors import ConfigError, InvalidRequestError, NotFoundError
from supervisor.io.hub_download import forget, recorded


def model(place: Target, name: str) -> CatalogModel:
    """The model to remove. Raises NotFoundError; InvalidRequestError for a name that stands for another model."""
    if (virtual := place.catalog.virtual.get(name)) is not None and name not in place.catalog.models:
        raise InvalidRequestError(
            f"{name} is a virtual model, of {virtual.model.id}: take it out of {place.path} yourself."
        )
    found = place.catalog.models.get(ModelId(name))
    if found is None:
        raise NotFoundError(f"There is no model {name!r} in {place.path}.")
    if place.catalog.is_local(found):
        path = getattr(found.config, "path", "")
        raise InvalidRequestError(
            f"{name} has no entry to remove: it is one of the models of a folder (models_from). Move or delete {path}, and it goes."
        )
    return found


def take_out(place: Target, name: str) -> None:
    """Remove its entry. Raises LlmuxError, and has changed nothing, where another one refers to it."""
    with place.changing() as now:
        text = without_entry(now.text, name)
        try:
            load_text(text, now.path)
        except ConfigError as error:
            users = [virtual.name for virtual in now.catalog.virtual.values() if virtual.model.id == name]
            if not users:
                raise
            raise InvalidRequestError(
                f"Virtual models refer to {name}: {', '.join(users)}. Take them out of {place.path} first."
            ) from error
        now.write(text)


def pulled(catalog: Catalog, wanted: CatalogModel) -> tuple[Path, list[str]]:
    """The folder and the names of the files that `llmux pull` got for this model alone."""
    source = wanted.config.source
    if source is None:
        return Path(), []
    folder = sources.folder(source, wanted.config, catalog.server.models_dir)
    shared = set(_used(catalog, wanted, folder))
    return folder, [name for name in _of(source.files, recorded(folder)) if name not in shared]


def delete(folder: Path, names: list[str], models_dir: Path) -> None:
    """Delete these files, and the folders below `models_dir` that are empty then. Raises OSError."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    forget(folder, names)
    emptied = {place for name in names for place in (folder / name).parents if models_dir in place.parents}
    for place in sorted(emptied, reverse=True):  # what lies in another comes before it
        with contextlib.suppress(OSError):  # not empty
            place.rmdir()


def _used(catalog: Catalog, removed: CatalogModel, folder: Path) -> Iterator[str]:
    """The files in this folder that other models have."""
    for other in catalog.models.values():
        source = other.config.source
        if other is removed or source is None:
            continue
        if sources.folder(source, other.config, catalog.server.models_dir) == folder:
            yield from _of(source.files, recorded(folder))


def _of(patterns: list[str], names: list[str]) -> list[str]:
    """Those that the patterns mean; without patterns, all."""
    return [name for name in names if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
