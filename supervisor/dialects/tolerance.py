"""What clients send that is not quite what an API says, and what its makers take it for. All decoders call these."""

from __future__ import annotations


def arguments_text(said: str) -> str:
    """The arguments of an earlier call of a tool, as JSON: agents keep an empty text of a call without any."""
    return said if said.strip() else "{}"
