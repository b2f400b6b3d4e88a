"""The assembly's part for names that stand for a model and changes to its requests: virtual models and tasks.

A task's candidate may itself be a virtual model. Both are compiled into one rewrite: the candidate's values override those of
the virtual model, key by key.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from pydantic import BaseModel

from supervisor.catalog.catalog import TASK, CatalogModel, Route, Task, VirtualModel
from supervisor.catalog.document.document import Items, Leaf, Node, Table, Trail, find
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.catalog.problems import suggestion
from supervisor.catalog.sections.sections import ParametersConfig, VirtualModelConfig
from supervisor.catalog.sections.tasks import CandidateConfig, TaskConfig

S = TypeVar("S", bound=BaseModel)

Models = Mapping[str, CatalogModel | None]
"""Every model of the file; None for an invalid one."""


class PublicNames(abc.ABC):
    """The part of the assembly that reads the two sections. It needs the abstract methods of the other part."""

    @abc.abstractmethod
    def _report(self, node: Node, trail: Trail, message: str) -> None: ...

    @abc.abstractmethod
    def _report_missing(self, node: Node, trail: Trail, message: str) -> None:
        """Report a name of a missing model."""

    @abc.abstractmethod
    def _section_entries(self, name: str) -> Mapping[str, Node]: ...

    @abc.abstractmethod
    def _check_name(self, name: str, node: Node, trail: Trail) -> None: ...

    @abc.abstractmethod
    def _validated(self, model: type[S], node: Node, trail: Trail) -> S | None: ...

    # --------------------------------------------------------------------------------------------------- virtual models

    def _virtual_models(self, models: Models) -> dict[str, VirtualModel]:
        section = self._section_entries("virtual_models")
        virtual: dict[str, VirtualModel] = {}
        for name, node in section.items():
            trail = ("virtual_models", name)
            self._check_name(name, node, trail)
            unfolded = self._with_plain_keys(node, trail)
            config = self._validated(VirtualModelConfig, unfolded, trail)
            if config is None:
                continue
            if config.model not in models:
                message = (
                    f'"{config.model}" is itself a virtual model; refer to a model'
                    if config.model in section
                    else f'no model "{config.model}"{suggestion(config.model, models, what="there is")}'
                )
                self._report_missing(find(unfolded, ("model",))[0], (*trail, "model"), message)
                continue
            if name in models and name != config.model:
                self._report(node, trail, f'hides the model "{name}" behind another; give it a name of its own')
            model = models[config.model]
            if (
                model is not None and not model.config.enabled and name != config.model
            ):  # a virtual model of the same name is disabled with it
                message = (
                    f'the model "{config.model}" is disabled, so nothing would answer: enable it, or remove this name'
                )
                self._report(find(unfolded, ("model",))[0], (*trail, "model"), message)
            if model is not None and model.config.enabled:
                rewrite = self._rewrite(config, model, node, trail)
                virtual[name] = VirtualModel(name, model, rewrite, config.description, config=config)
        return virtual

    def _with_plain_keys(self, node: Node, trail: Trail) -> Node:
        """The node with `physical` renamed to `model`, and the keys below `params` moved up beside it."""
        if not isinstance(node, Table):
            return node
        entries = dict(node.entries)
        params = entries.pop("params", None)
        moved: dict[str, Node] = {}
        if isinstance(params, Table):
            moved.update(params.entries)
        elif params is not None:
            self._report(params, (*trail, "params"), "expected a mapping")
        if "physical" in entries:
            moved["model"] = entries.pop("physical")
        for key, value in moved.items():
            if key in entries:
                self._report(value, trail, f'"{key}" is given twice')
            entries[key] = value
        return replace(node, entries=entries)

    def _rewrite(self, config: ParametersConfig, model: CatalogModel, node: Node, trail: Trail) -> Rewrite:
        thinking = model.adapter.fields(model.config)
        if config.enable_thinking is not None:
            switch = model.thinking
            if switch is None:
                what = (
                    f"the runtime {model.adapter.name}" if model.prompts is None else f"its {model.prompts.name} format"
                )
                message = f'"enable_thinking": {what} has no such switch for {model.id}'
                self._report(node, trail, message)
            else:
                thinking = switch.enabled if config.enable_thinking else switch.disabled
        return Rewrite.compile(
            upstream_model=model.adapter.upstream_model(model.config),
            strip=config.strip,
            defaults=config.defaults,
            force=config.force,
            thinking=thinking,
            system_prompt_prefix=config.system_prompt_prefix,
        )

    # ------------------------------------------------------------------------------------------------------------ tasks

    def _tasks(self, models: Models, virtual: Mapping[str, VirtualModel]) -> dict[str, Task]:
        tasks: dict[str, Task] = {}
        for name, node in self._section_entries("tasks").items():
            trail = ("tasks", name)
            self._check_name(name, node, trail)
            config = self._validated(TaskConfig, self._with_candidate_tables(node, trail), trail)
            if config is None:
                continue
            found = [
                self._candidate(one, models, virtual, node, (*trail, "candidates", at))
                for at, one in enumerate(config.candidates)
            ]
            candidates = tuple(one for one in found if one is not None)
            if len(candidates) == len(found):
                first = candidates[0]
                public = f"{TASK}{name}"
                tasks[public] = Task(
                    public, first.model, first.rewrite, config.description, config=config, candidates=candidates
                )
        return tasks

    def _with_candidate_tables(self, node: Node, trail: Trail) -> Node:
        """The task's node with each candidate as a mapping: a name alone is its `model`."""
        listed = node.entries.get("candidates") if isinstance(node, Table) else None
        if not isinstance(node, Table) or not isinstance(listed, Items):
            return node
        nodes = (
            Table({"model": one}, one.place)
            if isinstance(one, Leaf)
            else self._with_plain_keys(one, (*trail, "candidates", at))
            for at, one in enumerate(listed.nodes)
        )
        return replace(node, entries={**node.entries, "candidates": replace(listed, nodes=tuple(nodes))})

    def _candidate(
        self, config: CandidateConfig, models: Models, virtual: Mapping[str, VirtualModel], task: Node, trail: Trail
    ) -> Route | None:
        """The route of a candidate; None if the candidate, or its model, is not valid."""
        at, place = find(task, trail[2:])[0], trail
        virtual_model = virtual.get(config.model)
        if virtual_model is None and config.model not in models:
            known = (*models, *virtual)
            if config.model in self._section_entries("virtual_models"):
                return None  # its problems were reported
            what = f'no model or virtual model "{config.model}"{suggestion(config.model, known, what="there is")}'
            self._report_missing(at, place, what)
            return None
        model = models[config.model] if virtual_model is None else virtual_model.model
        if model is None:
            return None
        if not model.config.enabled:
            self._report(at, place, f'the model "{config.model}" is disabled: enable it, or take it off the list')
            return None
        parameters = config if virtual_model is None else _merged(virtual_model.config, config)
        return Route(config.model, model, self._rewrite(parameters, model, at, place))


def _merged(below: ParametersConfig, above: ParametersConfig) -> ParametersConfig:
    """The merged parameters; where both set a value, `above` wins."""
    first = {key: getattr(above, key) for key in ("enable_thinking", "system_prompt_prefix")}
    chosen = {key: getattr(below, key) if value is None else value for key, value in first.items()}
    return ParametersConfig(
        **chosen,
        defaults={**below.defaults, **above.defaults},
        force={**below.force, **above.force},
        strip=tuple(dict.fromkeys((*below.strip, *above.strip))),
    )
