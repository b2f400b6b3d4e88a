"""Edits of the configuration's file, and models that are added to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Struct

from supervisor.schema.daemon import Difference
from supervisor.schema.operation import doc


class Edit(Struct, forbid_unknown_fields=True, kw_only=True):
    """A change of the file: its whole text, or settings of one model."""

    text: Annotated[str | None, doc("The whole file.")] = None
    model: Annotated[str | None, doc("The model whose settings change.")] = None
    keys: Annotated[dict[str, Any], doc("Its keys and their values; null: the key's default.")] = {}
    names: Annotated[list[str] | None, doc("All its further names.")] = None
    remove: Annotated[bool, doc("Take the model out instead, with its further names.")] = False
    files: Annotated[bool, doc("Delete the files that llmux fetched for it, too.")] = False
    force: Annotated[bool, doc("Write although no models or no keys are left.")] = False


class Mark(Struct):
    """A mistake; line and column count from 1, and are 0 where it isn't in this text."""

    line: int
    column: int
    key: str
    message: str


class Room(Struct):
    """A device on which the model would be, and what it would lease there; of those that are too small, the largest."""

    device: str
    name: str
    need_mib: int
    usable_mib: int


class Fit(Struct):
    """What loading a model would mean now. `others`: who would go for it, or whom it would wait for."""

    outcome: Literal["fits", "evicts", "waits", "refused"]
    rooms: list[Room]
    others: list[str]
    why: str


class PulledFiles(Struct):
    """What llmux fetched for a model alone."""

    folder: str
    names: list[str]
    bytes: int


class Checked(Struct):
    """What an edit would do. It can be saved iff there are neither `marks` nor `guarded` keys.

    `files`: those of a model that goes, which are deleted iff the edit says so.
    """

    etag: str
    text: str
    diff: str
    marks: list[Mark]
    guarded: list[str]
    notes: list[str]
    difference: Difference | None = None
    fit: Fit | None = None
    files: PulledFiles | None = None


class Version(Struct, frozen=True):
    """A text that was in force. `at`: when it was first seen, in Unix seconds."""

    id: str
    at: float
    bytes: int


class FileView(Struct):
    """The base file. `locked`: why it can't be changed from here."""

    path: str
    text: str
    etag: str
    edit: Literal["none", "safe", "all"]
    locked: str | None
    guarded_keys: list[str]
    versions: list[Version]


class VersionView(Struct):
    """An earlier text."""

    id: str
    at: float
    text: str


class Setting(Struct):
    """A key that can be set. `written`: what the file says; `value`: what is in effect."""

    key: str
    schema: Mapping[str, Any]
    description: str
    written: Any
    value: Any


class SettingsView(Struct):
    """What can be set of a model. `other_names`: names with settings of their own, which are edited as text."""

    model: str
    etag: str
    locked: str | None
    settings: list[Setting]
    names: list[str]
    other_names: list[str]


class Variant(Struct):
    """One quantisation of a repository's model, and by which words it is wanted. `taken`: the one that is chosen by itself."""

    quantisation: str
    reference: str
    size_bytes: int
    need_mib: int
    fits: bool
    taken: bool


class Found(Struct):
    """What there is. `names`: what it would be called, or is, where it isn't new. `entry`: the lines for the configuration.

    `device`: the one for which it fits or doesn't; `why`: the chosen one and not the largest that fits.
    """

    names: list[str]
    is_new: bool
    entry: str
    device: str | None
    why: str
    variants: list[Variant]
    problems: list[str]


class Wanted(Struct, forbid_unknown_fields=True):
    """A model to add."""

    what: Annotated[
        str,
        doc(
            "ORG/REPO, ORG/REPO:QUANTISATION, the address of its page, a well-known name, or a path on the daemon's machine."
        ),
    ]
    name: Annotated[str | None, doc("Its name here; null: as it is called there.")] = None


class Addition(Struct):
    """One that was asked for. `stage`: what it does, in words; `names`: the models that were entered."""

    id: str
    what: str
    name: str | None
    state: Literal["queued", "running", "done", "failed", "cancelled"] = "queued"
    stage: str = ""
    done_bytes: int = 0
    total_bytes: int | None = None
    bytes_per_s: float | None = None
    eta_s: float | None = None
    names: list[str] = []
    error: str | None = None


class Additions(Struct):
    """Those under way and the last that ended, the newest first."""

    data: list[Addition]
