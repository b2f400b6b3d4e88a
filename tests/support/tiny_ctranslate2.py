"""Tiny models for the ctranslate2 runtime, written once per machine by tests/support/generators/ctranslate2.py."""

from __future__ import annotations

from pathlib import Path

from tests.support import environments, made_once, tiny_language

GERMAN, FRENCH = "Hallo von einem kleinen Modell", "Bonjour d'un petit modèle"


def language(**options: object) -> Path:
    """A language model that says the same as `tiny_language.model(**options)`, which it is converted from."""
    source = tiny_language.model(**options)
    (library,) = (environments.installed("ctranslate2") / "ctranslate2").glob("lib/python3*/site-packages")
    name, beside = "ctranslate2-language", ("ctranslate2",)
    return made_once.generated(
        name, "ctranslate2", "transformers", str(library), beside=beside, kind="language", source=str(source)
    )


def translator(kind: str = "languages") -> Path:
    """A translation model: `languages`, or `pair`."""
    return made_once.generated(f"ctranslate2-{kind}", "ctranslate2", "ctranslate2", kind=kind)
