"""The section `tasks`: ladders of candidates, also in a file `tasks.yaml` of their own."""

from __future__ import annotations

from pydantic import Field

from supervisor.catalog.sections.sections import ParametersConfig, Seconds, Section


class CandidateConfig(ParametersConfig):
    """A step of a task's ladder: a model and what is done to its requests."""

    model: str = Field(
        min_length=1,
        description="The model or virtual model that answers. A virtual model's own changes are made as well; where both "
        "say something, the candidate's counts.",
        examples=["qwen"],
    )


class TaskConfig(Section):
    """A public name: a ladder of candidates, of which the best that can answers."""

    candidates: tuple[CandidateConfig, ...] = Field(
        min_length=1,
        max_length=100,
        description="Who may answer, in the order of preference. The first is the primary. A name alone is enough.",
        examples=[["qwen", "smaller"]],
    )
    description: str | None = Field(
        default=None, description="Shown in the list of models.", examples=["Titles of chats"]
    )
    pin_primary: bool = Field(
        default=False,
        description="Load the primary rather than let a loaded candidate answer in its place.",
        examples=[True],
    )
    keep_alive_s: Seconds | None = Field(
        default=None,
        description="How long the model that answered stays loaded after its last request, at least. Default: as its own "
        "keep_alive_s says.",
        examples=[300],
    )
    budget_s: Seconds | None = Field(
        default=None,
        description="Time for an answer, in seconds. A request that can't have one in time is refused at once.",
        examples=[60],
    )
    allow_remote: bool = Field(
        default=False,
        description="Its requests may leave this machine for remote candidates, without saying so themselves.",
        examples=[True],
    )
