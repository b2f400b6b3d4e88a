"""A configuration under construction: its sections, and notes on what could not be imported.

A note says that a setting is *lost* (not in the result) or to be *looked at* (it works differently). Notes about a model
also stand above it in the written file. `settle` removes every key that our own validation refuses, so that the written file
is always valid.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain, count
from pathlib import Path, PurePath

from pydantic import BaseModel, JsonValue

from runtimes.adapters.options import extra_args
from runtimes.registry import REGISTRY
from supervisor.catalog.document.document import Layer, Place, Problem, Source, Table, Trail, dotted, plain, tree_of
from supervisor.catalog.document.yaml_writer import Comments, comment, to_yaml
from supervisor.catalog.loading.folders import models_dir
from supervisor.catalog.models import sources
from supervisor.catalog.problems import validate
from supervisor.catalog.sections.sections import LimitsConfig, ServerConfig, VirtualModelConfig
from supervisor.catalog.sections.tasks import TaskConfig

Values = dict[str, JsonValue]

_PLACE = Place(Source(Layer.FILE, "import", Path("/")))
_SECTIONS = ("models", "virtual_models", "tasks", "limits", "server")
_FILES = ("path", "binary", "mmproj", "draft_model")
_OPAQUE = re.compile(r"[^!-~\u00a1-\U0010ffff]+")
_KINDS = ((r"whisper|parakeet", "asr"), (r"tts|kokoro|piper|chatterbox", "tts"), (r"^sd-|stable-?diffusion", "image"))


@dataclass(frozen=True, slots=True)
class Note:
    """A remark for the person who imports. `where` is a key in the source."""

    where: str
    message: str
    lost: bool


@dataclass(slots=True)
class Draft:
    models: dict[str, Values] = field(default_factory=dict)
    virtual_models: dict[str, Values] = field(default_factory=dict)
    tasks: dict[str, Values] = field(default_factory=dict)  # ladders: of names, or of mappings with a `model`
    limits: Values = field(default_factory=dict)
    server: Values = field(default_factory=dict)
    keys: list[Values] = field(default_factory=list)  # clients' keys: entries of the file of API keys
    notes: list[Note] = field(default_factory=list)
    at_rest: dict[str, str] = field(default_factory=dict)  # models not loaded at the start → the key that says so
    _names: dict[str, str] = field(default_factory=dict)  # by foreign name
    _comments_above: dict[Trail, list[str]] = field(default_factory=dict)

    def lose(self, where: str, message: str, *, model: str | None = None) -> None:
        self._add_note(Note(where, message, lost=True), model)

    def lose_unknown(
        self,
        prefix: str,
        keys: Iterable[str],
        known: Container[str],
        why: Mapping[str, str] | None = None,
        model: str | None = None,
    ) -> None:
        """Note each key that is not known. `why`: remarks on some of these keys."""
        for key in keys:
            if key not in known:
                self.lose(f"{prefix}{key}", (why or {}).get(key, "llmux has nothing like it"), model=model)

    def look(self, where: str, message: str, *, model: str | None = None) -> None:
        self._add_note(Note(where, message, lost=False), model)

    def _add_note(self, note: Note, model: str | None) -> None:
        """Add a note, once even where several names of a model repeat it."""
        if note not in self.notes:
            self.notes.append(note)
        if model is not None:
            key = note.where.rpartition(".")[2]
            self.comment(model, f"{'Not imported' if note.lost else 'Look at'}: {key}: {note.message}")

    def comment(self, model: str, line: str) -> None:
        """Add a comment line above the model."""
        lines = self._comments_above.setdefault(("models", model), [])
        if line not in lines:
            lines.append(line)

    def name(self, foreign_name: str) -> str:
        """The valid name for this foreign name, always the same: without spaces, and no other's. A change of the name is noted."""
        if foreign_name not in self._names:
            usable = _usable_name(foreign_name)
            taken = {*self._names.values()}
            free = (name for name in chain([usable], (f"{usable[:190]}-{n}" for n in count(2))) if name not in taken)
            self._names[foreign_name] = name = next(free)
            if name != foreign_name:
                why = "names have no spaces" if name == usable else f'"{usable}" is the name of another'
                self.look(foreign_name, f'is called "{name}" now: {why}')
        return self._names[foreign_name]

    def reserve(self, foreign_names: Iterable[str]) -> None:
        """Those of the names that are valid as they are stay so: no changed name may take them."""
        self._names.update({name: name for name in foreign_names if _usable_name(name) == name})

    def virtual(self, name: str, model: str) -> Values:
        """The virtual model of that name, made if missing; the name may be the model's own."""
        return self.virtual_models.setdefault(name, {"model": model})

    def merge(self, name: str, model: str, part: str, values: Mapping[str, JsonValue]) -> None:
        """Add to the `defaults` or `force` of a virtual model."""
        if values:
            known = self.virtual(name, model).setdefault(part, {})
            assert isinstance(known, dict)
            known.update(values)

    def switch_off(self, model: str, why: str) -> None:
        """Disable an unloaded model that this machine can't load now."""
        where = self.at_rest.pop(model)
        self.models[model]["enabled"] = False
        self.notes = [note for note in self.notes if note.where != where]
        key = where.rpartition(".")[2]
        above = self._comments_above[("models", model)]
        above[:] = [line for line in above if not line.startswith(f"Look at: {key}:")]
        self.look(where, f'it stays off ({why}); once that is mended, take "enabled: false" out', model=model)

    def spread(self, model: str) -> None:
        """Copy the defaults of the model's own name to its other names."""
        defaults = self.virtual_models.get(model, {}).get("defaults")
        for name, virtual in self.virtual_models.items():
            if isinstance(defaults, dict) and virtual["model"] == model != name:
                virtual.setdefault("defaults", dict(defaults))

    def list_models(self) -> None:
        """Also list the models behind virtual models by their own names, as the other program did."""
        for virtual in list(self.virtual_models.values()):
            model = self.models.get(str(virtual["model"]))
            if model is not None and virtual["model"] not in self.virtual_models:
                model.setdefault("public", True)

    def settle(self) -> None:
        """Remove invalid keys, and note them."""
        for name, values in list(self.models.items()):
            placed = _paths_of_source(values)
            runtime = values.get("runtime") or REGISTRY.infer({**placed, **values})
            if runtime is None:
                self._drop_model(name)
                continue
            adapter = REGISTRY.get(str(runtime))
            usual = {
                "runtime": adapter.name,
                **{key: placed[key] for key in placed if key in adapter.config.model_fields},
            }
            trail: Trail = ("models", name)
            former = adapter.config.former_keys
            if words := extra_args(former, values):
                values["extra_args"] = words
            for key in former:
                values.pop(key, None)
            for key in _FILES:
                if isinstance(path := values.get(key), str) and not path.startswith(("/", "~", "$")):
                    self.look(f"models.{name}.{key}", f"{path} starts from the folder of the written file", model=name)
            for problem in _remove_invalid(adapter.config, {**usual, **values}, values, trail):
                self.lose(dotted(problem.trail), problem.message, model=name)
            if validate(adapter.config, tree_of({**usual, **values}, _PLACE), trail)[0] is None:
                self._drop_model(name)
        for name, values in list(self.virtual_models.items()):
            answers = str(values["model"])
            if answers not in self.models:
                del self.virtual_models[name]
                continue
            if self.models[answers].get("enabled") is False and name != answers:
                del self.virtual_models[name]
                self.lose(f"virtual_models.{name}", f"{answers} is switched off, so nothing would answer")
                continue
            for problem in _remove_invalid(VirtualModelConfig, values, values, ("virtual_models", name)):
                self.lose(dotted(problem.trail), problem.message)
        self._settle_tasks()
        for section, model in (("limits", LimitsConfig), ("server", ServerConfig)):
            part: Values = getattr(self, section)
            for problem in _remove_invalid(model, part, part, (section,)):
                self.lose(dotted(problem.trail), problem.message)

    def _settle_tasks(self) -> None:
        usable = {name for name, values in self.models.items() if values.get("enabled") is not False}
        usable |= {name for name, values in self.virtual_models.items() if values["model"] in usable}
        for name, values in list(self.tasks.items()):
            candidates = {_candidate_name(one): one for one in list_of(values["candidates"])}
            for missing in [model for model in candidates if model not in usable]:
                self.lose(f"tasks.{name}.candidates", f"there is no model {missing} that is served")
                del candidates[missing]
            if not candidates:
                del self.tasks[name]
                self.lose(f"tasks.{name}", "is left out: nobody is left who could answer")
                continue
            values["candidates"] = list(candidates.values())
            spelt: list[JsonValue] = [one if isinstance(one, dict) else {"model": one} for one in candidates.values()]
            for problem in _remove_invalid(TaskConfig, {**values, "candidates": spelt}, values, ("tasks", name)):
                self.lose(dotted(problem.trail), problem.message)
            if "candidates" not in values:
                del self.tasks[name]

    def _drop_model(self, name: str) -> None:
        del self.models[name]
        self._comments_above.pop(("models", name), None)
        self.lose(f"models.{name}", "is left out: nothing is left that could be run")

    def document(self) -> Values:
        """The configuration as data."""
        sections = {name: getattr(self, name) for name in _SECTIONS}
        return {name: dict(part) for name, part in sections.items() if part or name == "models"}

    def text(self, head: Iterable[str]) -> str:
        lines = "".join(f"{comment(line)}\n" for line in head)
        return lines + "\n" + to_yaml(self.document(), Comments(above=self._comments_above))

    def report(self) -> list[dict[str, JsonValue]]:
        return [asdict(note) for note in self.notes]

    def report_lines(self) -> Iterator[str]:
        for lost, title in ((True, "Not imported:"), (False, "Look at:")):
            notes = [note for note in self.notes if note.lost is lost]
            if notes:
                yield title
                yield from (f"  {note.where}: {note.message}" for note in notes)


def _candidate_name(entry: JsonValue) -> str:
    return text_of(entry.get("model") if isinstance(entry, dict) else entry)


def _usable_name(foreign_name: str) -> str:
    return _OPAQUE.sub("-", foreign_name).strip("/")[:200] or "model"


def _paths_of_source(values: Values) -> Values:
    """The paths that follow from a model's `source`, if any."""
    node = tree_of(values, _PLACE)
    assert isinstance(node, Table)
    return {key: plain(path) for key, path in sources.source_paths(node, models_dir()).items()}


def _remove_invalid(model: type[BaseModel], tried: Values, values: Values, trail: Trail) -> Iterator[Problem]:
    """Remove each invalid key from `values`, and yield its problem."""
    for problem in validate(model, tree_of(tried, _PLACE), trail)[1]:
        key = problem.trail[len(trail)] if len(problem.trail) > len(trail) else None
        if values.pop(str(key), None) is not None:
            yield problem


def guess_type(program: str) -> str | None:
    """The type of a program's models, by its name; None for an LLM or an unknown program."""
    name = PurePath(program).name.lower()
    return next((kind for pattern, kind in _KINDS if re.search(pattern, name)), None)


def object_of(value: JsonValue) -> Values:
    """The mapping; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def list_of(value: JsonValue) -> list[JsonValue]:
    """The list; an empty one for anything else."""
    return value if isinstance(value, list) else []


def text_of(value: JsonValue) -> str:
    """A value as a word of a command line."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
