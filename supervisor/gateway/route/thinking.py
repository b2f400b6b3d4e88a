"""The thinking modes of a public name: whether a request may switch the model's reasoning on or off."""

from __future__ import annotations

from supervisor.catalog import CatalogModel, Rewrite
from supervisor.schema.model import ThinkingMode


def thinking_modes(rewrite: Rewrite, model: CatalogModel) -> tuple[ThinkingMode, ...]:
    """The modes that a request may choose: `default` is the model's own behaviour.

    `rewrite` is the public name's; `model` may have an operator's overrides. The first call may block on the model's files.
    """
    switch = model.thinking
    fixed = None if switch is None else rewrite.switches(switch)
    if fixed is not None:
        return ("enabled",) if fixed else ("disabled",)
    known = model.known_capabilities
    if known is None or known.thinking is None:
        return ("default",)
    if not known.thinking:
        return ("disabled",)
    return ("default", "enabled", "disabled") if switch is not None else ("enabled",)
