"""How long models stay, as the configuration says it: keep-alives by type, and the models that come back.

A model's own `keep_alive_s` counts before that of its type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticKnownError

from runtimes.model_config import ModelConfig
from supervisor.catalog.document import Items, Node, Problem, Table, Trail, find
from supervisor.catalog.problems import suggestion

if TYPE_CHECKING:
    from supervisor.catalog.catalog import CatalogModel, VirtualModel
    from supervisor.catalog.sections import LimitsConfig

KEEP_ALIVE_BY_TYPE: Final[Mapping[str, float | Literal["forever"]]] = {"image": 900, "llm": 300, "vision": 60}
"""What `by_type` stands for; other types stay until their memory is needed."""

_Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _spelled_out(written: object) -> object:
    if written == "by_type":
        return dict(KEEP_ALIVE_BY_TYPE)
    if not isinstance(written, dict):
        raise PydanticKnownError("literal_error", {"expected": "'by_type' or a mapping"})
    return written


class StayingConfig(BaseModel):
    """The part of `limits` that says so."""

    keep_alive: Annotated[
        dict[str, _Seconds | Literal["forever"]],
        BeforeValidator(
            _spelled_out, json_schema_input_type=Literal["by_type"] | dict[str, _Seconds | Literal["forever"]]
        ),
    ] = Field(
        default_factory=dict,
        description="`keep_alive_s` of models that set none, by type. `by_type`: image 900, llm 300, "
        "vision 60. Default, and of types not named: `forever`.",
        examples=["by_type", {"llm": 300}],
    )
    default_model: str | list[str] = Field(
        default_factory=list,
        description="The model, or models, to come back when nothing else is asked for.",
        examples=["qwen3-8b", ["qwen3-8b", "whisper"]],
    )
    default_after_s: _Seconds = Field(
        default=300.0, description="They come back when no other model was used for this long."
    )

    def keep_alive_of(self, config: ModelConfig) -> float | None:
        """What a model that sets none gets; None: it stays until its memory is needed."""
        seconds = self.keep_alive.get(config.type)
        return None if seconds == "forever" else seconds

    @property
    def default_models(self) -> tuple[str, ...]:
        """The names in `default_model`."""
        return (self.default_model,) if isinstance(self.default_model, str) else tuple(self.default_model)


def with_keep_alives(
    limits: LimitsConfig | None, models: Mapping[str, CatalogModel | None]
) -> dict[str, CatalogModel | None]:
    """The models, each sound one with the keep-alive of its type."""
    return {
        name: replace(model, type_keep_alive_s=limits.keep_alive_of(model.config)) if model and limits else model
        for name, model in models.items()
    }


def staying_problems(
    names: Sequence[str],
    at: Trail,
    root: Table,
    models: Mapping[str, CatalogModel | None],
    virtual: Mapping[str, VirtualModel],
    named: Mapping[str, Node],
) -> Iterator[Problem]:
    """What is wrong with the names at `at`, which come back or are pinned. `virtual`: the sound ones of all that are `named`."""
    verb, noun = ("be pinned", "pin") if at[-1] == "pin" else ("come back", "return")
    for index, name in enumerate(names):
        trail = (*at, index) if isinstance(find(root, at)[0], Items) else at
        place = find(root, trail)[0].place
        if name in virtual:
            model: CatalogModel | None = virtual[name].model
        elif name in models:
            model = models[name]
        else:
            if name not in named:  # else its own problem is told
                yield Problem(place, trail, f'no model "{name}"{suggestion(name, [*models, *named], what="there is")}')
            continue
        if model is not None and not model.config.enabled:
            yield Problem(place, trail, f'the model "{name}" is disabled, so it can\'t {verb}: enable it')
        elif model is not None and model.adapter.remote:
            yield Problem(place, trail, f'"{name}" runs elsewhere: it is never unloaded, and needs no {noun}')
