"""The section `sets`: named choices of which models are pinned and which come back, of which one at a time is active."""

from __future__ import annotations

from pydantic import Field

from supervisor.catalog.sections import Section

CONFIGURED = "configured"
"""What stands for no set, so none may be called so."""


class SetConfig(Section):
    """What holds while the set is active, instead of `limits.default_model` and the models' own `pin`."""

    description: str | None = Field(default=None, description="Shown beside its switch.", examples=["In the evening"])
    default_model: str | list[str] = Field(
        default_factory=list,
        description="The model, or models, to come back when nothing else is asked for.",
        examples=["qwen-coder"],
    )
    pin: list[str] = Field(
        default_factory=list,
        description="The models that are never evicted; all others may be.",
        examples=[["qwen-coder", "embedder"]],
    )

    @property
    def default_models(self) -> tuple[str, ...]:
        """The names in `default_model`."""
        return (self.default_model,) if isinstance(self.default_model, str) else tuple(self.default_model)
