"""Finds the model that a runner's client names, and translates its configuration into the client's terms."""

from __future__ import annotations

import re
from typing import Final

from supervisor.catalog import CatalogModel
from supervisor.core.types import ModelId
from supervisor.daemon.daemon import Daemon
from supervisor.engine.status import ModelStatus
from supervisor.errors import InvalidRequestError, NotFoundError

_GGUF: Final = re.compile(r"(?:^|[-_.])(I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32)(?=\.gguf$|-\d{5}-of-)", re.IGNORECASE)
_PLAIN: Final = {
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "f32": "fp32",
}
_UNSET: Final = frozenset({"", "auto", "none"})
_BITS: Final = re.compile(r"[-_](?:int)?(\d+)(?:-?bit)?$")


def model_of(daemon: Daemon, name: str, field: str = "modelId") -> ModelId:
    """The model with this id, public name, source or path; `field` is the field that named it.

    Raises InvalidRequestError, NotFoundError.
    """
    catalog = daemon.catalog
    if (route := catalog.route(name)) is not None:
        return route.model.id
    found = [model.id for model in catalog.models.values() if name in _other_names(model)]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidRequestError(
            f"{name!r} is what several models are made of; name one of them: {', '.join(found)}.",
            code="ambiguous_model",
            param=field,
        )
    raise NotFoundError(
        f"There is no model {name!r}; GET /v1/capabilities lists the choice.", code="model_not_found", param=field
    )


def _other_names(model: CatalogModel) -> set[str]:
    """A client's other names for a model: its repository on the hub, its path, its name at another server, its size."""
    config = model.config
    names = {config.source.repo} if config.source is not None else set()
    for key in ("path", "model", "upstream_model"):
        if (value := getattr(config, key, None)) is not None:
            names.add(str(value))
    return names | set(model.adapter.known_as(config))


def quantization_of(model: CatalogModel) -> str | None:
    """The quantization, from the configuration or the name of the model's file; None if unknown."""
    config = model.config
    for key in ("quantization", "dtype"):
        value = getattr(config, key, None)
        if isinstance(value, str) and value not in _UNSET:
            return _PLAIN.get(value, value)
    found = _GGUF.search(str(getattr(config, "path", "")))
    return None if found is None else _PLAIN.get(found[1].lower(), found[1])


def is_same_quantization(one: str, other: str) -> bool:
    """Whether both names mean the same. `awq` also equals `awq-4bit`, because `awq` gives no number of bits."""
    (kind, bits), (other_kind, other_bits) = _kind_and_bits(one), _kind_and_bits(other)
    return kind == other_kind and (bits == other_bits or not (bits and other_bits))


def _kind_and_bits(quantisation: str) -> tuple[str, str]:
    quantisation = quantisation.strip().lower()
    quantisation = _PLAIN.get(quantisation, quantisation)
    found = _BITS.search(quantisation)
    return (quantisation, "") if found is None else (quantisation[: found.start()], found[1])


def context_of(model: CatalogModel) -> int | None:
    """The tokens of one request's context; None if unknown."""
    known = model.known_capabilities
    return None if known is None else known.context


def memory_of(status: ModelStatus) -> int | None:
    """The memory of a model's workers in MiB: measured, else leased; None without workers."""
    return status.lease_mib if status.measured_mib is None else status.measured_mib
