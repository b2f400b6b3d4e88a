"""Every package that is locked has a licence; what is under strong copyleft is told before it is installed."""

from __future__ import annotations

import platform

import pytest

from runtimes.licences import copyleft, known, notice
from runtimes.registry import REGISTRY
from tests.support.cases import cases
from tools import licences, locks
from tools.licences import Copyleft


class TestFile:
    """`make licences` has been run since a lock changed."""

    def test_every_pin_has_a_licence(self):
        assert sorted(locks.all_pins() - known().keys()) == [], "run `make licences`"

    def test_nothing_else_is_there(self):
        assert sorted(known().keys() - locks.all_pins()) == [], "run `make licences`"

    def test_marks_follow_from_the_licences(self):
        assert {pin: licences.entry(told["licence"]) for pin, told in known().items()} == known()

    def test_what_is_told_by_hand_is_locked(self):
        assert licences.BY_HAND.keys() <= {pin.partition("==")[0] for pin in known()}


class TestDeclared:
    """What metadata tells: an expression, else classifiers, else words."""

    @cases(
        ("metadata", "licence"),
        [
            ({"license_expression": "mit OR apache-2.0", "license": "x"}, "MIT OR Apache-2.0"),
            (
                {"license": "GPL-3.0-or-later", "classifier": ["License :: OSI Approved :: MIT License"]},
                "GPL-3.0-or-later",
            ),
            ({"license": "BSD", "classifier": ["Topic :: A", "License :: OSI Approved :: BSD License"]}, "BSD License"),
            ({"classifier": ["License :: OSI Approved :: A", "License :: OSI Approved :: B"]}, "A, B"),
            ({"license": "MIT License\n\nCopyright (c)"}, "MIT License"),
            ({"classifier": ["Topic :: A"]}, ""),
        ],
    )
    def test_declared(self, metadata, licence):
        assert licences.declared(metadata) == licence


class TestCopyleft:
    """Strong and weak are told apart; of alternatives the mildest counts."""

    @cases(
        ("licence", "strength"),
        [
            ("MIT", Copyleft.NONE),
            ("LGPL-2.1-or-later", Copyleft.WEAK),
            ("MPL-2.0 AND MIT", Copyleft.WEAK),
            ("GPL-3.0-or-later", Copyleft.STRONG),
            ("AGPL-3.0-only", Copyleft.STRONG),
            ("MIT OR GPL-2.0-only", Copyleft.NONE),
            ("MIT AND GPL-2.0-only", Copyleft.STRONG),
            ("MIT AND (GPL-2.0-only OR LGPL-3.0-only)", Copyleft.WEAK),
            ("MIT OR Apache-2.0 AND GPL-2.0-only", Copyleft.NONE),
            ("BSD-3-Clause AND GPL-3.0-or-later WITH GCC-exception-3.1", Copyleft.WEAK),
            ("GNU General Public License v3 or later (GPLv3+)", Copyleft.STRONG),
            ("GNU Affero General Public License v3", Copyleft.STRONG),
            ("GNU Lesser General Public License v2 (LGPLv2)", Copyleft.WEAK),
            ("Mozilla Public License 2.0 (MPL 2.0)", Copyleft.WEAK),
            ("BSD License", Copyleft.NONE),
        ],
    )
    def test_strength(self, licence, strength):
        assert licences.copyleft(licence) is strength


class TestUpdate:
    """Only what is new is asked for; what can't be found out is told, and the rest is kept."""

    @pytest.fixture
    def file(self, tmp_path, monkeypatch):
        path = tmp_path / "licences.json"
        path.write_text('{"old==1": {"licence": "MIT"}, "gone==1": {"licence": "MIT"}}')
        for module in ("runtimes.licences", "tools.licences"):
            monkeypatch.setattr(f"{module}.FILE", path)
        return path

    def test_new_and_gone(self, file, monkeypatch):
        monkeypatch.setattr(licences, "metadata_of", {"new==2": {"license": "GPL-3.0-only"}}.__getitem__)
        licences.update(["old==1", "new==2"])
        assert known() == {"new==2": {"licence": "GPL-3.0-only", "copyleft": "strong"}, "old==1": {"licence": "MIT"}}

    def test_none_told(self, file, monkeypatch):
        monkeypatch.setattr(licences, "metadata_of", lambda _pin: {})
        with pytest.raises(licences.NoLicenceError, match=r"new==2.*BY_HAND"):
            licences.update(["old==1", "new==2"])
        assert known() == {"old==1": {"licence": "MIT"}}


class TestNotice:
    """Names what is under strong copyleft, and nothing else."""

    def folder(self, name):
        requirements = REGISTRY.get(name).requirements
        assert requirements is not None
        return requirements.parent

    def test_chatterbox(self):
        assert copyleft(self.folder("chatterbox"))["pykakasi"] == "GPL-3.0-or-later"
        told = notice("chatterbox", self.folder("chatterbox"))
        assert told is not None
        assert told.startswith("chatterbox: its environment holds packages under strong copyleft licences: ")
        assert "pykakasi (GPL-3.0-or-later)" in told
        assert "certifi" not in told

    def test_a_wheel_that_holds_more_than_its_own_code(self):
        assert "GPL-2.0-or-later" in copyleft(self.folder("faster_whisper"))["av"]

    @pytest.mark.parametrize(("machine", "packages"), [("x86_64", set()), ("aarch64", {"av"})])
    def test_what_only_other_machines_get(self, monkeypatch, machine, packages):
        monkeypatch.setattr(platform, "machine", lambda: machine)
        assert copyleft(self.folder("sglang")).keys() == packages

    def test_none(self):
        assert notice("llama_server", self.folder("llama_server")) is None
