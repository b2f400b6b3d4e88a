"""A workflow of ComfyUI in its API format, and the inputs of its nodes that a request sets.

In this format a workflow is an object: node's id → `{"class_type", "inputs", "_meta": {"title"}}`; a link to another
node's output is `[id, index]`. An input's place is `NODE.INPUT`, where NODE is the node's id or its title.

Where the configuration names no places, those of the usual nodes are found: a sampler's own seed, steps and
guidance, the nodes that its `positive`, `negative` and `latent_image` lead to, and the nodes that load a checkpoint or a picture.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

NAMES: Final = (
    *("prompt", "negative_prompt", "seed", "steps", "guidance", "width", "height", "n"),
    *("checkpoint", "image", "mask", "strength"),
)
"""The names of values that a request may set."""

Node = Mapping[str, Any]
Place = tuple[str, str]  # a node's id, and the name of its input

_PREFIX: Final = "filename_prefix"
_SAMPLER: Final = {"seed": ("seed", "noise_seed"), "steps": ("steps",), "guidance": ("cfg",), "strength": ("denoise",)}
_SIZE: Final = {"width": "width", "height": "height", "n": "batch_size"}
_LOADERS: Final = {"ckpt_name": "checkpoint", "image": "image"}


class WorkflowError(Exception):
    """The file is no workflow in this format, or lacks a place. The message names the remedy."""


@dataclass(frozen=True, slots=True)
class Workflow:
    """A workflow: its nodes, and the place of each value that requests may set."""

    nodes: Mapping[str, Node]
    places: Mapping[str, Place]

    @property
    def takes_picture(self) -> bool:
        """Does the workflow take a picture from the request?"""
        return "image" in self.places

    @property
    def saves(self) -> bool:
        """Does the workflow save a picture?"""
        return any(_PREFIX in node["inputs"] for node in self.nodes.values())

    def fill(self, values: Mapping[str, object], prefix: str) -> dict[str, Any]:
        """A copy of the workflow with these values, by name, in their places. Names of saved files begin with `prefix`.

        ComfyUI doesn't run a node again with unchanged inputs. A new prefix for each run makes every run save files.
        """
        nodes = copy.deepcopy(dict(self.nodes))
        for name, value in values.items():
            number, key = self.places[name]
            nodes[number]["inputs"][key] = value
        for node in nodes.values():
            if _PREFIX in node["inputs"]:
                node["inputs"][_PREFIX] = prefix
        return nodes


def read(path: Path, inputs: Mapping[str, str]) -> Workflow:
    """Read the workflow in this file, with the given places, or else the usual ones. Blocks. Raises WorkflowError."""
    try:
        nodes = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkflowError(f"workflow: {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise WorkflowError(f"workflow: {path} is not JSON: {error}") from error
    if isinstance(nodes, dict) and isinstance(nodes.get("nodes"), list):
        raise WorkflowError(
            f"workflow: {path} is in the format of ComfyUI's editor; there, use Export (API) and name that file"
        )
    if not isinstance(nodes, dict) or not nodes or not all(map(_is_node, nodes.values())):
        raise WorkflowError(
            f"workflow: {path} holds no workflow in API format: an object of nodes with class_type and inputs"
        )
    if inputs:
        return Workflow(nodes, {name: _find_place(nodes, name, text) for name, text in inputs.items()})
    return Workflow(nodes, dict(_usual_places(nodes)))


def _is_node(node: object) -> bool:
    return isinstance(node, dict) and isinstance(node.get("class_type"), str) and isinstance(node.get("inputs"), dict)


def _find_place(nodes: Mapping[str, Node], name: str, text: str) -> Place:
    called, _, key = text.rpartition(".")
    ids = [called] if called in nodes else [number for number, node in nodes.items() if _node_title(node) == called]
    if len(ids) != 1 or not key:
        there = ", ".join(f"{number} ({_node_title(node) or node['class_type']})" for number, node in nodes.items())
        problem = "several nodes have this title" if len(ids) > 1 else "there is no such node"
        raise WorkflowError(f"inputs: {name}: {text}: {problem}; write NODE.INPUT with one of {there}")
    if key not in nodes[ids[0]]["inputs"]:
        there = ", ".join(nodes[ids[0]]["inputs"])
        raise WorkflowError(f"inputs: {name}: {text}: this node has no such input; it has: {there}")
    return ids[0], key


def _node_title(node: Node) -> str | None:
    meta = node.get("_meta")
    return meta.get("title") if isinstance(meta, dict) else None


def _usual_places(nodes: Mapping[str, Node]) -> Iterator[tuple[str, Place]]:
    """The usual place of each name, found from the samplers and loaders."""
    for number, node in reversed([*nodes.items()]):  # of several, the first one wins: it comes last
        for key, name in _LOADERS.items():
            if isinstance(node["inputs"].get(key), str) and "Load" in node["class_type"]:
                yield name, (number, key)
    samplers = [number for number, node in nodes.items() if "positive" in node["inputs"]]
    if not samplers:
        return
    sampler = samplers[0]
    inputs = nodes[sampler]["inputs"]
    for name, keys in _SAMPLER.items():
        for key in keys:
            if key in inputs and not isinstance(inputs[key], list):
                yield name, (sampler, key)
    for name, key in {"prompt": "positive", "negative_prompt": "negative"}.items():
        if (place := _upstream_place(nodes, inputs.get(key), "text")) is not None:
            yield name, place
    for name, key in _SIZE.items():
        if (place := _upstream_place(nodes, inputs.get("latent_image"), key)) is not None:
            yield name, place


def _upstream_place(nodes: Mapping[str, Node], link: object, key: str) -> Place | None:
    """The place of the nearest node upstream of a link that has this input."""
    seen: set[str] = set()
    waiting = [link]
    while waiting:
        link = waiting.pop(0)
        number = str(link[0]) if isinstance(link, list) and link else ""
        if number not in nodes or number in seen:
            continue
        seen.add(number)
        inputs = nodes[number]["inputs"]
        if key in inputs and not isinstance(inputs[key], list):
            return number, key
        waiting += inputs.values()
    return None
