"""The JSON schema of the configuration file, generated from the models that validate it.

For editors (`# yaml-language-server: $schema=…`) and for the test that holds config/llmux.example.yaml complete.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, JsonValue
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from runtimes.registry import REGISTRY, Registry
from supervisor.catalog.sections.clients import ClientConfig
from supervisor.catalog.sections.sections import (
    DeviceConfig,
    FoldersConfig,
    LimitsConfig,
    ServerConfig,
    SetConfig,
    VirtualModelConfig,
)
from supervisor.catalog.sections.tasks import CandidateConfig, TaskConfig

Schema = dict[str, JsonValue]


def json_schema(registry: Registry = REGISTRY) -> Schema:
    """The schema of the whole file with the keys of every runtime. Imports all adapters."""
    configs = {name: registry.get(name).config for name in registry.names()}
    parts: list[type[BaseModel]] = [
        ServerConfig,
        LimitsConfig,
        DeviceConfig,
        VirtualModelConfig,
        CandidateConfig,
        TaskConfig,
        SetConfig,
        ClientConfig,
        FoldersConfig,
        *configs.values(),
    ]
    mode: JsonSchemaMode = "validation"
    references, definitions = models_json_schema([(part, mode) for part in parts], ref_template="#/$defs/{model}")
    schemas = definitions["$defs"]
    refs = {part: str(references[part, mode]["$ref"]) for part in parts}
    for name, config in configs.items():
        own = schemas[refs[config].removeprefix("#/$defs/")]
        own["properties"]["runtime"] |= {"const": name}
        own["required"] = [key for key in own.get("required", []) if key != "runtime"]
    for part in (VirtualModelConfig, CandidateConfig):
        _accept_other_spellings(schemas[refs[part].removeprefix("#/$defs/")])
    candidates = schemas[refs[TaskConfig].removeprefix("#/$defs/")]["properties"]["candidates"]
    candidates["items"] = {"anyOf": [{"type": "string"}, candidates["items"]]}
    folders = schemas.pop(refs.pop(FoldersConfig).removeprefix("#/$defs/"))["properties"]["models_from"]
    one_of: list[JsonValue] = [{"$ref": refs[config]} for config in configs.values()]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "llmux.yaml",
        "type": "object",
        "properties": {
            "models": {"type": ["object", "null"], "additionalProperties": {"anyOf": one_of}},
            "models_from": folders | {"type": ["array", "string"]},
            "virtual_models": {
                "type": ["object", "null"],
                "additionalProperties": {"$ref": refs[VirtualModelConfig]},
            },
            "sets": {"type": ["object", "null"], "additionalProperties": {"$ref": refs[SetConfig]}},
            "tasks": {"type": ["object", "null"], "additionalProperties": {"$ref": refs[TaskConfig]}},
            "clients": {"type": ["object", "null"], "additionalProperties": {"$ref": refs[ClientConfig]}},
            "devices": {"anyOf": [{"const": "auto"}, {"type": "array", "items": {"$ref": refs[DeviceConfig]}}]},
            "limits": {"$ref": refs[LimitsConfig]},
            "server": {"$ref": refs[ServerConfig]},
        },
        "patternProperties": {"^x-": {}},
        "additionalProperties": False,
        "$defs": schemas,
    }


def _accept_other_spellings(virtual: dict[str, Any]) -> None:
    """Allow the file's other spellings: `physical` for `model`, and parameters together under `params`."""
    properties = virtual["properties"]
    parameters = {key: value for key, value in properties.items() if key not in {"model", "description"}}
    properties["physical"] = properties["model"]
    properties["params"] = {"type": "object", "properties": parameters, "additionalProperties": False}
    del virtual["required"]
    virtual["oneOf"] = [{"required": ["model"]}, {"required": ["physical"]}]
