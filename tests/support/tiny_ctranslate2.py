"""Tiny models for the ctranslate2 runtime, written once per machine by tests/support/generators/ctranslate2.py."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.support import environments, tiny, tiny_language
from tests.support.limits import LIMIT_S

GENERATOR = Path(__file__).parent / "generators" / "ctranslate2.py"
GERMAN, FRENCH = "Hallo von einem kleinen Modell", "Bonjour d'un petit modèle"


def language(**options: object) -> Path:
    """A language model that says the same as `tiny_language.model(**options)`, which it is converted from."""
    return _made("language", tiny_language.python(), source=str(tiny_language.model(**options)))


def translator(kind: str = "languages") -> Path:
    """A translation model: `languages`, or `pair`."""
    return _made(kind, environments.installed("ctranslate2") / "ctranslate2" / "bin" / "python")


def _made(kind: str, python: Path, **options: object) -> Path:
    wanted = json.dumps({"kind": kind, **options}, sort_keys=True)
    digest = hashlib.sha256(wanted.encode() + GENERATOR.read_bytes()).hexdigest()[:16]
    folder = tiny.CACHE / "models" / f"ctranslate2-{kind}-{digest}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = folder.with_name(f"{folder.name}.{os.getpid()}")
        with tempfile.TemporaryDirectory() as library:
            _link_library(Path(library))
            done = subprocess.run(
                [python, "-I", GENERATOR, aside, wanted, library],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        assert done.returncode == 0, done.stderr
        try:
            aside.rename(folder)
        except OSError:  # another run was quicker
            shutil.rmtree(aside)
    return folder


def _link_library(folder: Path) -> None:
    """CTranslate2 alone, without what else its environment has."""
    environment = environments.installed("ctranslate2") / "ctranslate2"
    for found in environment.glob("lib/python3*/site-packages/ctranslate2*"):
        (folder / found.name).symlink_to(found)
