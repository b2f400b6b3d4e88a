"""The section `clients`: what holds for the requests of one client, who is a tenant by the name of the entry.

The entry `default` fills in what the others leave open, and is for everybody without an entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field, JsonValue, field_validator

from supervisor.catalog.limited import Limited
from supervisor.catalog.sections import Priority, refuse_routing

DEFAULT: Final = "default"


class ClientConfig(Limited):
    """One client's profile."""

    model: str | None = Field(
        default=None,
        min_length=1,
        description="The model of requests that name none, where it serves their path.",
        examples=["qwen"],
    )
    parameters: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Request fields that it doesn't send: set as if it did.",
        examples=[{"temperature": 0.3}],
    )
    priority: Priority | None = Field(
        default=None,
        description="How urgent its requests are that don't say, nor their key does; lower goes first. Default: normal.",
        examples=["low"],
    )
    weight: Annotated[float, Field(ge=0.01, le=100)] = Field(
        default=1.0,
        description="Its share beside other clients of the same class: twice the weight, twice the time of the workers.",
        examples=[2],
    )
    cooldown_errors: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0, description="After so many failed requests in a row it has to pause; 0: never.", examples=[20]
    )
    cooldown_burst: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0,
        description="It may send so many requests at once, and as many in each `cooldown_window_s`; one more, and it has to "
        "pause; 0: any number.",
        examples=[100],
    )
    cooldown_window_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        default=60.0, description="Window of `cooldown_burst`, in seconds."
    )
    cooldown_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        default=30.0, description="How long it has to pause then: its requests get 429 `client_cooldown`."
    )

    @field_validator("parameters")
    @classmethod
    def _llmux_owns_routing(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        refuse_routing(value)
        return value


NOBODY: Final = ClientConfig()


def filled(clients: Mapping[str, ClientConfig]) -> dict[str, ClientConfig]:
    """Each with what `default` says where it says nothing itself."""
    default = clients.get(DEFAULT, NOBODY)
    return {
        name: default.model_copy(update={key: getattr(client, key) for key in client.model_fields_set})
        for name, client in clients.items()
    }
