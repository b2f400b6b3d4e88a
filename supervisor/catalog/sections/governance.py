"""The key `server.governance`: signers who must agree to loads and unloads of models, and to flushes of caches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from supervisor.catalog.loading.ownership import exposure

KEY_FILE: Final = Path("/etc/safebox/model-api.key")
LEAST_KEY: Final = 16
"""Bytes of a key."""

Signer = Annotated[str, Field(min_length=1, max_length=100)]


class GovernanceConfig(BaseModel):
    """`server.governance`: the runner API's operations need a signed token."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    key_file: Path = Field(
        default=KEY_FILE,
        description="The key that all signers share. Whoever has it can sign for each of them; others may not be able to read it.",
    )
    signers: tuple[Signer, ...] = Field(default=(), description="Who may sign. Default: those of `signer_keys`.")
    required: int = Field(default=1, ge=1, le=100, description="So many of them must have signed.")
    signer_keys: dict[Signer, Path] = Field(
        default={},
        description="A key file for each signer, instead of the shared one: only then is it certain who signed.",
        examples=[{"alice": "~/.config/llmux/alice.key"}],
    )

    signed_fields: Literal["all", "seed"] = Field(
        default="all",
        description="What of a request its token must say. all: every field, so nobody can add one. seed: the operation and "
        "`modelId`, for signers that sign no more; whoever has such a token chooses the other fields.",
        examples=["seed"],
    )

    @model_validator(mode="after")
    def _check_signers(self) -> Self:
        names = self.all_signers
        if self.signer_keys and self.signers and set(self.signers) != set(self.signer_keys):
            raise ValueError('"signers" and "signer_keys" name different signers')
        if len(set(self.signer_keys.values())) < len(self.signer_keys):
            raise ValueError('two of "signer_keys" are the same file: whoever has it could sign for both')
        if self.required > max(1, len(names)):
            raise ValueError(f'"required" is {self.required}, but there are {len(names)} signers')
        return self

    def exposures(self) -> Iterator[str]:
        """Problems of existing key files that others can read or change. Blocks."""
        for path in self.signer_keys.values() or (self.key_file,):
            with contextlib.suppress(OSError):  # an unreadable key allows no operation
                if (problem := exposure(path.expanduser(), is_secret=True)) is not None:
                    yield problem

    @property
    def all_signers(self) -> frozenset[str]:
        """The names of all allowed signers; empty: any holder of the shared key."""
        return frozenset(self.signer_keys or self.signers)


def read_key(path: Path) -> bytes:
    """A key file without the blanks around its key. Blocks.

    Raises OSError, and ValueError for a key that is too short, or that others can read or change.
    """
    if (problem := exposure(path.expanduser(), is_secret=True)) is not None:
        raise ValueError(problem)
    key = path.expanduser().read_bytes().strip()
    if len(key) < LEAST_KEY:
        raise ValueError(f"{path}: a key has at least {LEAST_KEY} bytes; make one with: openssl rand -hex 32")
    return key
