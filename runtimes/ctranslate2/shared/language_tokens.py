"""The tokens that tell translation models the languages, by family of models."""

from __future__ import annotations

import re
from typing import Final

BEGINNING: Final = re.compile(r"__[a-z]{2,3}__|[a-z]{3}_[A-Z][a-z]{3}|[a-z]{2}_[A-Z]{2}")
"""NLLB, M2M-100 and mBART: source and target each begin with the token of their own language."""

BEFORE_SOURCE: Final = re.compile(r"<2[A-Za-z_]+>|>>[A-Za-z_]+<<")
"""MADLAD-400, and Opus-MT's models for many languages: the source begins with the token of the target language."""
