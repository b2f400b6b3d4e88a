"""The files that `llmux pull` fetched for a model: finding them, and deleting them with it."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator
from pathlib import Path

from supervisor.catalog.catalog import Catalog, CatalogModel
from supervisor.catalog.models import sources
from supervisor.host.hub.hub_download import forget, recorded


def pulled(catalog: Catalog, wanted: CatalogModel) -> tuple[Path, list[str]]:
    """The folder and the names of the files that `llmux pull` fetched only for this model."""
    source = wanted.config.source
    if source is None:
        return Path(), []
    folder = sources.folder(source, wanted.config, catalog.server.models_dir)
    shared = set(_files_of_others(catalog, wanted, folder))
    return folder, [name for name in _matching_names(source.files, recorded(folder)) if name not in shared]


def delete(folder: Path, names: list[str], models_dir: Path) -> None:
    """Delete these files, and the folders below `models_dir` that are empty then. Raises OSError."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    forget(folder, names)
    emptied = {place for name in names for place in (folder / name).parents if models_dir in place.parents}
    for place in sorted(emptied, reverse=True):  # subfolders first
        with contextlib.suppress(OSError):  # not empty
            place.rmdir()


def _files_of_others(catalog: Catalog, removed: CatalogModel, folder: Path) -> Iterator[str]:
    """The files in this folder that other models use."""
    for other in catalog.models.values():
        source = other.config.source
        if other is removed or source is None:
            continue
        if sources.folder(source, other.config, catalog.server.models_dir) == folder:
            yield from _matching_names(source.files, recorded(folder))


def _matching_names(patterns: list[str], names: list[str]) -> list[str]:
    """The names that match the patterns; without patterns, all."""
    return [name for name in names if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
