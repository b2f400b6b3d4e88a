"""Holds a model to a grammar: of all tokens, only those that continue it may come next.

llguidance follows the grammar and tells which tokens these are. It knows a model's tokens from a tokenizer of its own, made
from the model's when the first grammar is asked for: about a second for a large vocabulary.
"""

from __future__ import annotations

import threading
from typing import Any

import llguidance.hf  # type: ignore[import-not-found]  # its stubs are in the worker's environment
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits

from runtimes.kit.errors import WorkerError, unsupported
from runtimes.transformers.chat.model import Loaded


class Guide:
    """One answer's way through a grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> torch.Tensor:
        """For each token of the vocabulary whether it may come next; those that end an answer only where it may end.

        Raises WorkerError where nothing can, or following the grammar has become too much.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")).bool()

    def advance(self, token: int) -> None:
        """What came next. Raises WorkerError as `allowed` does."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise WorkerError(f"Nothing that the format allows can follow here ({reason}).", code="format_unusable")


class Guides:
    """Makes guides for one model. For use by several threads."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self._lock = loaded, threading.Lock()
        self._known: Any = None

    def guide(self, grammar: str) -> Guide:
        """For one answer. `grammar` is Lark, as llguidance has it. Raises WorkerError for a schema in it that can't be."""
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer(), LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise WorkerError(f"This can't be made a grammar: {matcher.get_error()}", code="format_unusable")
        return Guide(matcher)

    def mark(self, text: str) -> int | None:
        """The token that is this text and no part of any other; None where it is written like other text."""
        token = self._loaded.one(text)
        return token if token is not None and self._tokenizer().is_special_token(token) else None

    def _tokenizer(self) -> Any:
        with self._lock:
            if self._known is None:
                try:
                    self._known = llguidance.hf.from_tokenizer(
                        self._loaded.tokenizer, eos_token=sorted(self._loaded.ends)
                    )
                except ValueError as error:
                    raise unsupported("response_format", f"this model's tokenizer can't be guided: {error}") from error
            return self._known
