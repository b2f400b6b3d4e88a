"""`llmux remove`: take a model out of the configuration."""

from __future__ import annotations

from supervisor.catalog import load_text
from supervisor.catalog.catalog import CatalogModel
from supervisor.catalog.edit import without_entry
from supervisor.cli.adding import Target
from supervisor.core.types import ModelId
from supervisor.errors import ConfigError, InvalidRequestError, NotFoundError


def model(place: Target, name: str) -> CatalogModel:
    """The model to remove. Raises NotFoundError; InvalidRequestError for a name that stands for another model."""
    if (virtual := place.catalog.virtual.get(name)) is not None and name not in place.catalog.models:
        raise InvalidRequestError(
            f"{name} is a virtual model, of {virtual.model.id}: take it out of {place.path} yourself."
        )
    found = place.catalog.models.get(ModelId(name))
    if found is None:
        raise NotFoundError(f"There is no model {name!r} in {place.path}.")
    if place.catalog.is_local(found):
        path = getattr(found.config, "path", "")
        raise InvalidRequestError(
            f"{name} has no entry to remove: it is one of the models of a folder (models_from). Move or delete {path}, and it goes."
        )
    return found


def take_out(place: Target, name: str) -> None:
    """Remove its entry. Raises LlmuxError, and has changed nothing, where another one refers to it."""
    with place.changing() as now:
        text = without_entry(now.text, name)
        try:
            load_text(text, now.path)
        except ConfigError as error:
            users = [virtual.name for virtual in now.catalog.virtual.values() if virtual.model.id == name]
            if not users:
                raise
            raise InvalidRequestError(
                f"Virtual models refer to {name}: {', '.join(users)}. Take them out of {place.path} first."
            ) from error
        now.write(text)
