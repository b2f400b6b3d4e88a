"""Edits of the configuration's base file through the API: by the dashboard, and by keys with the scope `configure`.

An edit has the whole text, or settings of one model. It passes the checks of a reload. It names the version of the file that it
starts from, so that no edit overwrites another change. Comments stay. The editor keeps every text that was in force, so that
each edit can be undone. The `server.edit` of the old text decides which keys an edit may change.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Literal

import structlog
from pydantic import JsonValue

from runtimes.model_config import PLACEMENT
from supervisor.catalog import Catalog, CatalogModel
from supervisor.catalog.assembly import MistakesError
from supervisor.catalog.document.document import MAX_BYTES, Layer, Problem, Source, dotted, parse, plain
from supervisor.catalog.document.edit import with_entries, with_keys, without_entry
from supervisor.catalog.document.guarded import KEYS, guarded_changes
from supervisor.catalog.models import local_models, pulled_files
from supervisor.core.memory.device_sets import allowed
from supervisor.core.planning.plans import Admit, Evict, Refuse, Wait
from supervisor.core.types import ModelId, ModelSpec
from supervisor.daemon.configuration.reload import Reloader
from supervisor.daemon.daemon import Daemon
from supervisor.errors import ConfigError, ForbiddenError, InvalidRequestError, LlmuxError, NotFoundError
from supervisor.host.store import files
from supervisor.host.store.versions import Versions, digest
from supervisor.schema.edit import (
    Checked,
    Edit,
    FileView,
    Fit,
    Mark,
    PulledFiles,
    Room,
    Setting,
    SettingsView,
    VersionView,
)

log = structlog.get_logger("llmux.editing")

KEPT_IN = "configurations"
"""The folder of earlier versions, in the state directory."""
EDITABLE = (
    *(key for key in PLACEMENT if key not in ("public", "enabled", "source", "prompt_format", "keep_bodies")),
    "gpus",
)
"""Keys of every model that an edit can set, whatever the runtime."""


class ChangedError(LlmuxError):
    """The file was changed after the version that this edit starts from."""

    status = HTTPStatus.PRECONDITION_FAILED
    type = "invalid_request_error"
    code = "configuration_changed"


class ReadOnlyError(LlmuxError):
    """llmux can't write the file; `detail` has the lines to enter at the file's origin."""

    status = HTTPStatus.CONFLICT
    type = "invalid_request_error"
    code = "configuration_read_only"


@dataclass(frozen=True, slots=True)
class _File:
    text: str
    locked: str | None

    @property
    def etag(self) -> str:
        return f'"{digest(self.text)}"'


class Editor:
    """The editor of a daemon's base file. Use from the event loop's thread."""

    def __init__(self, daemon: Daemon, reloader: Reloader) -> None:
        self._daemon = daemon
        self._reloader = reloader
        self._base = reloader.configuration.base
        self._versions = Versions(daemon.catalog.server.state_dir / KEPT_IN)
        self._lock = asyncio.Lock()
        self._keep_tasks: set[asyncio.Task[None]] = set()
        daemon.on_configure.append(self._keep_soon)

    async def file(self) -> FileView:
        """The current file. Raises InvalidRequestError if it can't be read."""
        found = await self._read()
        versions = await asyncio.to_thread(self._versions.listing)
        return FileView(
            str(self._base), found.text, found.etag, self._edit_policy, found.locked, sorted(KEYS), versions
        )

    async def version(self, wanted: str) -> VersionView:
        """An earlier version of the file. Raises NotFoundError."""
        versions = await asyncio.to_thread(self._versions.listing)
        text = await asyncio.to_thread(self._versions.read, wanted)
        if text is None:
            raise NotFoundError(f"There is no version {wanted[:50]!r} any more.", code="version_not_found")
        return VersionView(wanted, next(one.at for one in versions if one.id == wanted), text)

    async def settings(self, name: str) -> SettingsView:
        """The settings of a model that an edit can change, with the values in the file. Raises NotFoundError."""
        return await asyncio.to_thread(self._settings, self._daemon.catalog.resolve(name).model, await self._read())

    def _settings(self, model: CatalogModel, file: _File) -> SettingsView:
        """See `settings`. Blocks for milliseconds."""
        document = _document(file.text)
        entry = _table(_table(document, "models"), model.id)
        described = model.adapter.config.model_json_schema()["properties"]
        constraints = {**model.load_constraints, **model.adapter.constraints(*EDITABLE)}
        effective = model.config.model_dump(mode="json")
        settings = [
            Setting(key, constraint, described[key].get("description", ""), entry.get(key), effective.get(key))
            for key, constraint in constraints.items()
            if key not in KEYS
        ]
        plain_names, others = _names_of(document, model.id)
        return SettingsView(str(model.id), file.etag, file.locked, settings, plain_names, others)

    async def locked(self) -> str | None:
        """The reason why llmux can't change the file; None: it can."""
        return (await self._read()).locked

    async def check(self, edit: Edit) -> Checked:
        """Try an edit without saving. Raises InvalidRequestError for an invalid edit, EditError."""
        return await self._check(edit, await self._read())

    async def save(self, edit: Edit, etag: str) -> Checked:
        """Save an edit, and reload. If this raises, nothing has changed.

        Raises ChangedError, ReadOnlyError, ForbiddenError for guarded keys, ConfigError for mistakes.
        """
        async with self._lock:
            before = await self._read()
            if etag not in (before.etag, "*"):
                raise _changed_error(self._base)
            checked = await self._check(edit, before)
            if before.locked is not None:
                raise ReadOnlyError(
                    f"{self._base} can't be changed here: {before.locked}. Enter this where it comes from:",
                    detail=tuple(checked.diff.splitlines()),
                )
            if checked.marks:
                raise ConfigError(tuple(_mark_text(mark) for mark in checked.marks))
            if checked.guarded:
                raise ForbiddenError(
                    f"Only the owner of {self._base.name} changes {', '.join(checked.guarded)}: with these keys programs are "
                    "started, or files and variables read. server.edit: all lets keys with the scope configure change them, too.",
                    code="configuration_guarded",
                    detail=tuple(checked.guarded),
                )
            if checked.text == before.text:
                return checked
            await asyncio.shield(self._write(before, checked, force=edit.force or edit.remove))
            if edit.files and checked.files is not None:
                await asyncio.to_thread(self._delete, checked.files)
            return checked

    def _pulled_files(self, name: str | None) -> PulledFiles:
        """The pulled files of a model. Blocks on the model's folder."""
        catalog = self._daemon.catalog
        folder, names = pulled_files.pulled(catalog, catalog.models[ModelId(name or "")])
        sizes = [path.stat().st_size for path in (folder / one for one in names) if path.exists()]
        return PulledFiles(str(folder), names, sum(sizes))

    def _delete(self, pulled: PulledFiles) -> None:
        """Delete pulled files. Blocks. The model is removed already, so failures are only logged."""
        try:
            pulled_files.delete(Path(pulled.folder), pulled.names, self._daemon.catalog.server.models_dir)
        except OSError as error:
            log.warning("config.files_not_deleted", folder=pulled.folder, reason=str(error))

    async def _write(self, before: _File, checked: Checked, *, force: bool) -> None:
        await asyncio.to_thread(self._replace_text, before, checked.text)
        try:
            checked.difference = await self._reloader.reload("the file was edited", force=force)
        except LlmuxError:
            await asyncio.to_thread(files.rewrite, self._base, before.text)
            raise
        log.info("config.edited", path=str(self._base), etag=checked.etag)

    def _replace_text(self, before: _File, text: str) -> None:
        """Replace the file's text. Blocks. Raises ChangedError, ReadOnlyError."""
        try:
            with files.locked_folder(self._base.resolve().parent):
                if self._read_current().text != before.text:
                    raise _changed_error(self._base)
                self._versions.keep(before.text)
                files.rewrite(self._base, text)
        except OSError as error:
            raise ReadOnlyError(
                f"{error.filename or self._base} can't be written: {error.strerror}. Enter this where the file comes from:",
                detail=tuple(_diff(before.text, text).splitlines()),
            ) from error

    @property
    def _edit_policy(self) -> Literal["none", "safe", "all"]:
        wanted = self._daemon.catalog.server.edit
        return "safe" if wanted == "all" and not self._daemon.keyring else wanted

    async def _read(self) -> _File:
        return await asyncio.to_thread(self._read_current)

    def _read_current(self) -> _File:
        """Read the current file. Blocks. Raises InvalidRequestError if it can't be read."""
        if self._reloader.configuration.foreign is not None:
            return _File("", "llmux is configured by variables, or by another program's files")
        try:
            text = self._base.read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(
                f"{self._base} can't be read: {error}.", code="configuration_unreadable"
            ) from error
        refused = files.refusal(self._base.resolve().parent)
        locked = None if refused is None else f"{refused.filename}: {refused.strerror}"
        return _File(text, "server.edit is none" if self._edit_policy == "none" else locked)

    async def _check(self, edit: Edit, before: _File) -> Checked:
        checked = await asyncio.to_thread(self._draft, edit, before.text)
        text = checked.text
        try:
            rehearsal = await self._reloader.rehearse(text, force=edit.force or edit.remove)
        except MistakesError as error:
            checked.marks = [_mark(problem, self._reloader.configuration.label) for problem in error.found]
            return checked
        except ConfigError as error:
            checked.marks = [Mark(0, 0, "", problem) for problem in error.problems]
            return checked
        checked.difference = rehearsal.difference
        if edit.remove:
            checked.files = await asyncio.to_thread(self._pulled_files, edit.model)
        if edit.model is not None and (spec := rehearsal.specs.get(ModelId(edit.model))) is not None:
            checked.notes = list(self._overridden_keys(rehearsal.catalog, spec.id, edit.keys))
            checked.fit = None if spec.remote else self._fit(spec)
        return checked

    def _draft(self, edit: Edit, before: str) -> Checked:
        """The text after the edit, its diff, and the keys in it that only the owner may change. Blocks."""
        text = self._edited_text(edit, before)
        is_free = self._edit_policy == "all"
        guarded = () if is_free else guarded_changes(_document(before), _document(text))
        return Checked(f'"{digest(text)}"', text, _diff(before, text), [], [*guarded], [])

    def _overridden_keys(self, catalog: Catalog, model: ModelId, keys: Iterable[str]) -> Iterator[str]:
        """A note for each key of an edit that has no effect, because another file overrides it."""
        for key in keys:
            place = catalog.origin("models", model, key)
            if place is not None and place.source.label != self._reloader.configuration.label:
                yield f"{place} sets {key}, too, and that counts."

    def _edited_text(self, edit: Edit, text: str) -> str:
        """The text after the edit. Blocks on the files of a model without an entry. Raises InvalidRequestError, EditError."""
        if (edit.text is None) == (edit.model is None):
            raise InvalidRequestError('An edit gives either "text" or "model".', param="text")
        if edit.text is not None:
            new = edit.text.replace("\r\n", "\n")
            new = new.replace("\n", "\r\n") if "\r\n" in text else new
            if len(new.encode("utf-8", "surrogatepass")) > MAX_BYTES:
                raise InvalidRequestError(f"A configuration has at most {MAX_BYTES >> 20} MiB.", param="text")
            return new
        assert edit.model is not None
        model = self._daemon.catalog.models.get(ModelId(edit.model))
        if model is None:
            raise NotFoundError(f"There is no model {edit.model[:200]!r}.", code="model_not_found", param="model")
        if edit.remove:
            return self._text_without_model(text, model)
        settable = {*model.load_constraints, *EDITABLE} - KEYS
        if unknown := [key for key in edit.keys if key not in settable]:
            raise InvalidRequestError(
                f"keys.{unknown[0][:100]}: can't be set here; edit the text.", param=f"keys.{unknown[0][:100]}"
            )
        if edit.keys and model.id not in _table(_document(text), "models"):
            text = with_entries(text, {model.id: self._entry_of(model.id)})
        text = with_keys(text, model.id, edit.keys) if edit.keys else text
        return text if edit.names is None else self._with_names(text, model.id, edit.names)

    def _text_without_model(self, text: str, model: CatalogModel) -> str:
        """The text without the model and its plain aliases. Raises InvalidRequestError, EditError."""
        document, catalog = _document(text), self._daemon.catalog
        if catalog.is_local(model):
            path = getattr(model.config, "path", "")
            raise InvalidRequestError(
                f"{model.id} has no entry to take out: it is one of the models of a folder (models_from). Move or delete {path}, and it goes."
            )
        if model.id not in _table(document, "models"):
            raise InvalidRequestError(
                f"{model.id} has no entry in {self._base.name}: another file has it. Edit that one."
            )
        for name in _names_of(document, model.id)[0]:
            text = without_entry(text, name, "virtual_models")
        return without_entry(text, model.id)

    def _entry_of(self, name: ModelId) -> Mapping[str, JsonValue]:
        """A new entry for a model that comes from a folder and has none. Raises InvalidRequestError."""
        model = self._daemon.catalog.models[name]
        path = getattr(model.config, "path", None)
        found, _ = (
            local_models.find(path) if isinstance(path, Path) and self._daemon.catalog.is_local(model) else ([], [])
        )
        if not found:
            raise InvalidRequestError(f"{name} has no entry in {self._base.name}: another file has it. Edit that one.")
        return found[0].entry

    def _with_names(self, text: str, model: ModelId, names: list[str]) -> str:
        """The text with exactly these plain aliases of the model. Raises InvalidRequestError, EditError."""
        document = _document(text)
        now, others = _names_of(document, model)
        virtual = _table(document, "virtual_models")
        for name in names:
            if name not in now and (name in virtual or name in others):
                raise InvalidRequestError(f"{name[:200]} has settings of its own; edit the text.", param="names")
        for name in now:
            if name not in names:
                text = without_entry(text, name, "virtual_models")
        new = {name: {"model": str(model)} for name in names if name not in now}
        return with_entries(text, new, "virtual_models") if new else text

    def _fit(self, spec: ModelSpec) -> Fit:
        answer = self._daemon.engine.what_if(spec)
        devices = {device.spec.id: device.spec for device in self._daemon.sampler.devices()}
        if isinstance(answer, Refuse):
            mine = allowed(spec.devices, spec.kinds, tuple(devices.values()))
            largest = max(mine, key=lambda device: device.usable_mib, default=None)
            room = (
                [] if largest is None else [Room(largest.id, largest.label, largest.need(spec).mib, largest.usable_mib)]
            )
            return Fit("refused", room, [], answer.reason)
        rooms = [
            Room(device, devices[device].label, mib, devices[device].usable_mib)
            for device, mib in zip(answer.devices, answer.need_mib, strict=True)
        ]
        match answer:
            case Admit():
                return Fit("fits", rooms, [], answer.reason)
            case Evict():
                return Fit("evicts", rooms, [str(name) for name in answer.victims], answer.reason)
            case Wait():
                return Fit("waits", rooms, [str(name) for name in answer.waits_for], answer.reason)

    def _keep_soon(self) -> None:
        """Begin to keep the text that is in force now as a version."""
        task = asyncio.get_running_loop().create_task(self._keep_version())
        self._keep_tasks.add(task)
        task.add_done_callback(self._keep_tasks.discard)

    async def _keep_version(self) -> None:
        try:
            found = await self._read()
            if self._reloader.configuration.foreign is None:
                await asyncio.to_thread(self._versions.keep, found.text)
        except (OSError, LlmuxError) as error:
            log.warning("config.version_not_kept", reason=str(error))


def _changed_error(base: Path) -> ChangedError:
    return ChangedError(f"{base} has changed since you read it. Read it again, and make your change in that.")


def _mark(problem: Problem, label: str) -> Mark:
    """The mark of a problem in the file with this label. A problem in another file names its place in the message."""
    place, key = problem.place, dotted(problem.trail)
    if place.source.label == label:
        return Mark(place.line, place.column, key, problem.message)
    return Mark(0, 0, key, f"{place}: {problem.message}")


def _mark_text(mark: Mark) -> str:
    where = f"line {mark.line}: " if mark.line else ""
    return f"{where}{mark.key}: {mark.message}" if mark.key else f"{where}{mark.message}"


def _document(text: str) -> dict[str, JsonValue]:
    """The parsed text; empty if it can't be parsed."""
    node, _ = parse(text, Source(Layer.FILE, "", Path()))
    value = plain(node) if node is not None else {}
    return value if isinstance(value, dict) else {}


def _table(document: Mapping[str, JsonValue], key: str) -> dict[str, JsonValue]:
    found = document.get(key)
    return found if isinstance(found, dict) else {}


def _names_of(document: Mapping[str, JsonValue], model: str) -> tuple[list[str], list[str]]:
    """The plain aliases of a model, and its virtual models with settings of their own."""
    plain_names: list[str] = []
    others: list[str] = []
    for name, entry in _table(document, "virtual_models").items():
        if isinstance(entry, dict) and model in (entry.get("model"), entry.get("physical")):
            (plain_names if len(entry) == 1 else others).append(name)
    return plain_names, others


def _diff(before: str, after: str) -> str:
    """A unified diff without file names."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++")))
