"""Builds a `Catalog` from a merged tree: validates every section, checks every reference, collects all problems.

A mistake doesn't stop the checks, so that one run reports all mistakes. A configuration with a mistake gives no catalog.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, JsonValue

from runtimes.base import Contradiction
from runtimes.endpoints import SMALLEST
from runtimes.installed import program
from runtimes.model_config import ModelConfig
from runtimes.registry import AnyAdapter, Registry
from supervisor.catalog import hints
from supervisor.catalog.catalog import TASK, Catalog, CatalogModel, VirtualModel
from supervisor.catalog.document.document import (
    Items,
    Layer,
    Leaf,
    Node,
    Place,
    Problem,
    Source,
    Table,
    Trail,
    find,
    places,
    plain,
    tree_of,
)
from supervisor.catalog.hints import hint
from supervisor.catalog.loading.folders import models_dir, runtimes_dir
from supervisor.catalog.loading.runner_variables import VLLM_RUNTIME, with_defaults
from supervisor.catalog.models import sources
from supervisor.catalog.models.prompt_format import COMPLETIONS
from supervisor.catalog.models.public_names import PublicNames
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.catalog.problems import nearest, suggestion, types_at, validate
from supervisor.catalog.sections.clients import ClientConfig, filled
from supervisor.catalog.sections.sections import (
    CONFIGURED,
    DeviceConfig,
    FoldersConfig,
    LimitsConfig,
    ServerConfig,
    SetConfig,
)
from supervisor.core.types import DEFAULT_PRIORITY, REPLICA, ModelId
from supervisor.errors import ConfigError, NotFoundError

SECTIONS = ("models", "models_from", "virtual_models", "tasks", "sets", "clients", "devices", "limits", "server")
KEYS_NAME = "api_keys.yaml"
CLIENT_LIMIT = 100  # characters, as of the name of a key, which may be a client

NAME_RULE = "up to 200 visible characters without spaces, no leading slash"
_NAME = re.compile(r"(?!\.{1,2}$)(?!/)\S{1,200}")
_OWN_PATHS = re.compile(
    r"/|/(?:v1/)?health|/livez|/metrics|/api/v1/config|/v1/capabilities|/v1/cache/flush"
    r"|/(?:ui|models|v1/models|v1/admin|v1/jobs|v1/files|v1/batches)(?:/.*)?",
    re.DOTALL,
)
_NO_FOLDER = "there is no such folder"
"""The end of the message of an adapter that needs a folder."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")

S = TypeVar("S", bound=BaseModel)
Devices = tuple[DeviceConfig, ...] | Literal["auto"]


def is_name(text: str) -> bool:
    """Whether this is a valid name for a model."""
    return bool(_NAME.fullmatch(text)) and text.isprintable()


class Assembly(PublicNames):
    """Turns one tree into a catalog. `base` is the base file; the key file may lie beside it."""

    def __init__(
        self, root: Table, base: Path, registry: Registry, *, check_files: bool, vllm_defaults: Table | None = None
    ) -> None:
        """`vllm_defaults`: values of keys that a vllm_serve model leaves open."""
        self.root = root
        self.vllm_defaults = vllm_defaults or replace(root, entries={})
        self.base_path: Path | None = None
        self.origins: dict[Trail, Place] = {}  # of model keys that variables set
        self.base = base
        self.registry = registry
        self.check_files = check_files
        self.models_dir = Path()
        self.folders: tuple[Path, ...] = ()  # of `models_from`
        self.unread: list[str] = []  # a line for each unusable file in them
        self.problems: list[Problem] = []

    def catalog(self, earlier: list[Problem]) -> Catalog:
        """The catalog. Raises ConfigError with `earlier` and all further problems. Blocks on model files."""
        self.problems += earlier
        for name, node in self.root.entries.items():
            if name not in SECTIONS and not name.startswith("x-"):
                self._report(node, (name,), f"unknown section{_section_hint(name)}")
        server = self._server()
        limits = self._section(LimitsConfig, "limits")
        self._check_types("max_loaded", DEFAULT_PRIORITY)
        self._check_types("keep_alive", DEFAULT_PRIORITY)
        devices = self._devices()
        own_runtimes_dir = server.runtimes_dir if server else runtimes_dir()
        if self.check_files and server and server.api_keys is not None and not server.api_keys.exists():
            node, trail = find(self.root, ("server", "api_keys"))
            self._report(node, trail, f"{server.api_keys}: there is no such file")
        if self.check_files and server and server.governance is not None:
            node, trail = find(self.root, ("server", "governance"))
            for problem in server.governance.exposures():
                self._report(node, trail, problem)
        self.models_dir = server.models_dir if server else models_dir()
        if server is not None:
            self.base_path = server.model_base_path
        models = self._models(self._section_entries("models"), devices, own_runtimes_dir)
        self._add_local_models(models, devices, own_runtimes_dir)
        for name, model in models.items():
            if model is not None and limits is not None:
                models[name] = replace(model, type_keep_alive_s=limits.keep_alive_of(model.config))
        virtual = self._virtual_models(models)
        self._check_kept_loaded(limits.default_models if limits else (), ("limits", "default_model"), models, virtual)
        sets = self._sets()
        for name, config in sets.items():
            self._check_kept_loaded(config.default_models, ("sets", name, "default_model"), models, virtual)
            self._check_kept_loaded(config.pin, ("sets", name, "pin"), models, virtual)
        tasks = self._tasks(models, virtual)
        enabled = {name for name, model in models.items() if model is None or model.config.enabled}
        clients = self._clients({*virtual, *tasks, *enabled})
        if self.problems or server is None or limits is None:
            raise config_error(self.problems)
        if server.api_keys is None and (keys := self.base.with_name(KEYS_NAME)).is_file():
            server = server.model_copy(update={"api_keys": keys})
        return Catalog(
            models={ModelId(name): model for name, model in models.items() if model and model.config.enabled},
            virtual=virtual,
            tasks=tasks,
            clients=filled(clients),
            sets=sets,
            server=server,
            limits=limits,
            devices=devices,
            origins={**self.origins, **places(self.root)},
            models_from=self.folders,
            unread=tuple(self.unread),
        )

    def server(self) -> ServerConfig:
        """The section `server` alone. Raises ConfigError with its mistakes."""
        server = self._server()
        if server is None or self.problems:
            raise config_error(self.problems)
        return server

    def _server(self) -> ServerConfig | None:
        server = self._section(ServerConfig, "server")
        if server is None or server.model_base_path is None or "models_dir" in server.model_fields_set:
            return server
        return server.model_copy(update={"models_dir": server.model_base_path})

    def _report(self, node: Node, trail: Trail, message: str) -> None:
        self.problems.append(Problem(node.place, trail, message))

    def _report_missing(self, node: Node, trail: Trail, message: str) -> None:
        """Report a name that no model has. It is a mistake, unless a folder's missing file may be that model."""
        if self.folders:
            self.unread.append(str(Problem(node.place, trail, message)))
        else:
            self._report(node, trail, message)

    def _section(self, model: type[S], name: str) -> S | None:
        return self._validated(model, self._section_node(name) or Table({}, self.root.place), (name,))

    def _section_node(self, name: str) -> Node | None:
        """A section's node; None for an absent or empty section."""
        node = self.root.entries.get(name)
        return None if isinstance(node, Leaf) and node.value is None else node

    def _validated(self, model: type[S], node: Node, trail: Trail) -> S | None:
        value, problems = validate(model, self._with_absolute_paths(node, model, trail, ()), trail)
        self.problems += problems
        return value

    def _with_absolute_paths(self, node: Node, model: type[BaseModel], trail: Trail, below: Trail) -> Node:
        """The node with absolute paths: `~` and variables are expanded; relative paths start at the folder of their file."""
        match node:
            case Table():
                return replace(
                    node,
                    entries={
                        key: self._with_absolute_paths(value, model, trail, (*below, key))
                        for key, value in node.entries.items()
                    },
                )
            case Items():
                nodes = (
                    self._with_absolute_paths(item, model, trail, (*below, i)) for i, item in enumerate(node.nodes)
                )
                return replace(node, nodes=tuple(nodes))
            case Leaf(value=str(text)) if Path in types_at(model, below):
                unset = [a or b for a, b in _VARIABLE.findall(text) if (a or b) not in os.environ]
                for name in unset:
                    self._report(node, (*trail, *below), f"the environment variable {name} is not set")
                path = os.path.expanduser(os.path.expandvars(text))  # noqa: PTH111  Path raises where there is no such user
                if path.startswith("~"):
                    self._report(node, (*trail, *below), f"there is no user {path.partition('/')[0][1:]}")
                return replace(node, value=str(node.place.source.directory / path))
            case Leaf():
                return node

    def _section_entries(self, name: str) -> Mapping[str, Node]:
        """The entries of a section that is a mapping of names; empty for an absent section or another type."""
        node = self._section_node(name)
        if node is None:
            return {}
        if not isinstance(node, Table):
            self._report(node, (name,), "expected a mapping of names")
            return {}
        return node.entries

    def _check_types(self, key: str, known: Collection[str]) -> None:
        node, trail = find(self.root, ("limits", key))
        if len(trail) == 2 and isinstance(node, Table):
            for name, value in node.entries.items():
                if name not in known:
                    self._report(value, (*trail, name), f"no model type{suggestion(name, known)}")

    def _devices(self) -> Devices:
        node = self._section_node("devices")
        match node:
            case None | Leaf(value="auto"):
                return "auto"
            case Items():
                pass
            case _:
                self._report(node, ("devices",), 'expected "auto" or a list of devices')
                return "auto"
        devices: list[DeviceConfig] = []
        for index, item in enumerate(node.nodes):
            device = self._validated(DeviceConfig, item, ("devices", index))
            if device is None:
                continue
            if any((device.id, device.uuid) == (other.id, other.uuid) for other in devices):
                self._report(item, ("devices", index), f"{device.id or device.uuid} is there already")
            devices.append(device)
        if not node.nodes:
            self._report(node, ("devices",), 'an empty list: nothing could run; write "auto" or name a device')
        return tuple(devices)

    # ----------------------------------------------------------------------------------------------------------- models

    def _model_folders(self) -> tuple[Path, ...]:
        """The folders and files in `models_from`, and the model base path."""
        node = self._section_node("models_from")
        if isinstance(node, Leaf):  # a single folder needs no brackets
            node = Items((node,), node.place)
        found = None if node is None else self._validated(FoldersConfig, Table({"models_from": node}, node.place), ())
        return tuple(filter(None, (*(found.models_from if found is not None else ()), self.base_path)))

    def _local_entries(
        self, folder: Path, known: Collection[str], used: set[Path], runtimes: Path
    ) -> Iterator[tuple[str, Node]]:
        """A name and an entry for each model of this folder, except those in `used` or with a known name. Blocks on files."""
        from supervisor.catalog.models import local_models  # noqa: PLC0415  # few configurations need it

        try:
            found, problems = local_models.find(folder)
        except NotFoundError as error:
            found, problems = [], [str(error)]
        self.unread += problems
        names = {
            *known,
            *(name for name, node in self._section_entries("virtual_models").items() if name not in _scalars(node)),
        }
        for model in local_models.by_age(found):
            real = model.path.resolve()  # in the hub's cache the path is a link
            if not used.isdisjoint((model.path, *model.path.parents, real, *real.parents)):
                continue
            name, entry = model.name(names), model.entry
            if folder == self.base_path:  # as other runners do
                name = model.name_below(folder)
                if entry.get("runtime") == "transformers" and program(runtimes / VLLM_RUNTIME) is not None:
                    entry["runtime"] = VLLM_RUNTIME
            if name in names:
                self.unread.append(f"{model.path}: there is a model {name} already")
                continue
            names.add(name)
            yield name, tree_of(entry, Place(Source(Layer.FILE, str(model.path), folder)))

    def _add_local_models(
        self, models: dict[str, CatalogModel | None], devices: Devices, own_runtimes_dir: Path
    ) -> None:
        """Add the models of the folders. A model with a problem is left out and noted, since no entry in the file names it."""
        self.folders = self._model_folders()
        for folder in self.folders:
            paths = [path for one in models.values() if one is not None for _, path in sources.files_of(one.config)]
            used = {each for path in paths for each in (path, path.resolve())}
            found = dict(self._local_entries(folder, models, used, own_runtimes_dir))
            written = self._section_entries("models")
            self._put_models({**written, **found})
            for name, node in found.items():
                before = len(self.problems)
                models |= self._models({name: node}, devices, own_runtimes_dir)
                if len(self.problems) > before:
                    self.unread += map(str, self.problems[before:])
                    del self.problems[before:], models[name]
            self._put_models({**written, **{name: node for name, node in found.items() if name in models}})

    def _put_models(self, nodes: Mapping[str, Node]) -> None:
        if nodes:
            self.root = replace(self.root, entries={**self.root.entries, "models": Table(nodes, self.root.place)})

    def _models(
        self, nodes: Mapping[str, Node], devices: Devices, own_runtimes_dir: Path
    ) -> dict[str, CatalogModel | None]:
        """The models of these nodes; None for an invalid one."""
        known = None if devices == "auto" else [device.id for device in devices if device.id is not None]
        if known is not None and len(known) < len(devices):
            known = None  # only the driver knows all names: check_devices() checks them
        models: dict[str, CatalogModel | None] = {}
        for name, node in nodes.items():
            trail = ("models", name)
            self._check_name(name, node, trail)
            model = models[name] = self._model(name, node, trail)
            if model is None:
                continue
            if known is not None:
                self._check_device_names(model, known)
            self._check_spread(model, node, trail)
            self._check_probe(model, node, trail)
            self._check_prompt_format(model, node, trail)
            if self.check_files and model.config.enabled:
                self._check_base_path(model, node, trail)
                models[name] = self._with_troubles(model, node, trail, own_runtimes_dir)
        return models

    def _with_troubles(self, model: CatalogModel, node: Node, trail: Trail, own_runtimes_dir: Path) -> CatalogModel:
        """The model with its troubles on this machine. Settings that contradict each other are problems of the file."""

        def find_troubles() -> tuple[Problem, ...]:
            return _troubles(model, _adapter_messages(model, own_runtimes_dir), node, trail)

        messages = _adapter_messages(model, own_runtimes_dir)
        for message in messages:
            if isinstance(message, Contradiction):
                self._report_at_key(message, node, trail)
        troubles = _troubles(model, messages, node, trail)
        return replace(model, troubles=troubles, find_troubles=find_troubles, runtimes_dir=own_runtimes_dir)

    def _check_name(self, name: str, node: Node, trail: Trail) -> None:
        if not is_name(name):
            self._report(node, trail, f"not a name: {NAME_RULE}")
        elif REPLICA.search(name):
            self._report(node, trail, 'names that end with "#" and a number are those of replicas')
        elif name.startswith(TASK):
            self._report(node, trail, f'names that begin with "{TASK}" are those of tasks')

    def _model(self, name: str, node: Node, trail: Trail) -> CatalogModel | None:
        if not isinstance(node, Table):
            self._report(node, trail, 'expected the keys of a model, such as "path"')
            return None
        placed = sources.source_paths(node, self.models_dir)
        adapter = self._adapter(replace(node, entries={**placed, **node.entries}), trail)
        if adapter is None:
            return None
        node = sources.with_source(node, adapter.config)
        placed = sources.source_paths(node, self.models_dir)
        if adapter.name == VLLM_RUNTIME:
            node = with_defaults(node, self.vllm_defaults)
            self.origins |= places(node, trail)
        fitting = {key: leaf for key, leaf in placed.items() if key in adapter.config.model_fields}
        entries = {"runtime": Leaf(adapter.name, node.place), **fitting, **node.entries}
        config: ModelConfig | None = self._validated(adapter.config, replace(node, entries=entries), trail)
        if config is None:
            return None
        for endpoint in sorted(adapter.endpoints(config)):
            if _OWN_PATHS.fullmatch(endpoint.path):  # it would hide our endpoint, and other API keys could use it
                self._report_at_key(f"endpoints: {endpoint.path} is served by llmux itself", node, trail)
        rewrite = Rewrite.compile(upstream_model=adapter.upstream_model(config), thinking=adapter.fields(config))
        return CatalogModel(ModelId(name), config, adapter, rewrite)

    def _adapter(self, node: Table, trail: Trail) -> AnyAdapter | None:
        at = node.entries.get("runtime")
        values = {key: plain(value) for key, value in node.entries.items()}
        name = values["runtime"] if at is not None else self.registry.infer(values)
        if isinstance(name, str) and name in self.registry.names():
            return self.registry.get(name)
        known = self.registry.names()
        if at is not None:
            meant = hints.runtime(str(name)) or nearest(str(name), known)
            there_is = f'; did you mean "{meant}"?' if meant else "; llmux runtimes list shows which there are"
            self._report(at, (*trail, "runtime"), f"no such runtime{there_is}")
            self._report_at_once(node, trail, meant)
            return None
        known_keys = {*ModelConfig.model_fields, "path", "cmd"}
        slips = [key for key in values if key not in known_keys and nearest(key, ("path", "cmd"))]
        meant = f'; did you mean "{nearest(slips[0], ("path", "cmd"))}" where it says "{slips[0]}"?' if slips else ""
        foreign = (
            f'{found} (where it says "{key}")' for key in values if (found := hint(key, ("path", "cmd", "source")))
        )
        self._report(
            node,
            trail,
            'no "runtime", and nothing to tell it from (a path ending in .gguf: llama_server, a cmd: command)'
            + (sources.hub_name(node) or meant or next(foreign, "")),
        )
        self._report_at_once(node, trail)
        return None

    def _report_at_once(self, node: Table, trail: Trail, meant: str | None = None) -> None:
        """Report the other mistakes of a model without a valid runtime: by the runtime `meant`, else by the keys of every model."""
        config = ModelConfig if meant is None else self.registry.get(meant).config
        known = {key: value for key, value in node.entries.items() if meant or key in config.model_fields}
        self._validated(config, replace(node, entries={**known, "runtime": Leaf(meant or "", node.place)}), trail)

    def _check_device_names(self, model: CatalogModel, known: Sequence[str]) -> None:
        for index, name in enumerate(model.config.devices):
            if name not in known:
                trail = ("models", model.id, "devices", index)
                node = find(self.root, trail)[0]
                self._report(node, trail, f'no device "{name}"{suggestion(name, known, what="there is")}')

    def _check_spread(self, model: CatalogModel, node: Node, trail: Trail) -> None:
        """Check that the model's runtime can use the requested number of GPUs; if not, name the runtimes that can."""
        adapter, is_auto = model.adapter, model.config.gpus == "auto"
        if (is_auto or adapter.gpus(model.config) > 1) and not adapter.spreads:
            able = ", ".join(name for name in self.registry.names() if self.registry.get(name).spreads)
            message = f"gpus: a worker of {adapter.name} uses one GPU; of these it may use several: {able}"
            self._report_at_key(message, node, trail)
        elif is_auto and not adapter.divides:
            able = ", ".join(name for name in self.registry.names() if self.registry.get(name).divides)
            message = (
                f"gpus: {adapter.name} divides a model equally: say by how many GPUs. With auto these work: {able}"
            )
            self._report_at_key(message, node, trail)

    def _check_base_path(self, model: CatalogModel, node: Node, trail: Trail) -> None:
        """Check that the model's files lie below `model_base_path`. Follows links."""
        if self.base_path is None:
            return
        for key, path in sources.files_of(model.config):
            if not path.resolve().is_relative_to(self.base_path.resolve()):
                self._report_at_key(
                    f"{key}: {path} is not below {self.base_path} (server.model_base_path)", node, trail
                )

    def _check_probe(self, model: CatalogModel, node: Node, trail: Trail) -> None:
        """Check that there is a small request for the model, if its `probe` is one."""
        config, adapter = model.config, model.adapter
        if config.probe == "inference" and (adapter.remote or adapter.smallest_request(config) is None):
            kinds = " and ".join(SMALLEST)
            message = f"probe: there is no such probe for this model; workers of these types have one: {kinds}"
            self._report_at_key(message, node, trail)

    def _check_prompt_format(self, model: CatalogModel, node: Node, trail: Trail) -> None:
        """Check that the model's worker completes texts, if llmux writes its prompts."""
        if model.prompts is not None and COMPLETIONS not in {endpoint.path for endpoint in model.endpoints}:
            message = f"prompt_format: these prompts are for texts, so it needs a worker that serves {COMPLETIONS}"
            self._report_at_key(message, node, trail)

    def _report_at_key(self, message: str, node: Node, trail: Trail) -> None:
        self.problems.append(_problem_at_key(message, node, trail))

    def _sets(self) -> dict[str, SetConfig]:
        found: dict[str, SetConfig] = {}
        for name, node in self._section_entries("sets").items():
            if not is_name(name) or name == CONFIGURED:
                self._report(node, ("sets", name), f"not a name for a set: {NAME_RULE}, and not {CONFIGURED}")
            if (config := self._validated(SetConfig, node, ("sets", name))) is not None:
                found[name] = config
        return found

    def _check_kept_loaded(
        self,
        names: Sequence[str],
        at: Trail,
        models: Mapping[str, CatalogModel | None],
        virtual: Mapping[str, VirtualModel],
    ) -> None:
        """Check that the models named at `at` can come back, or be pinned. `virtual`: the valid virtual models."""
        verb, noun = ("be pinned", "pin") if at[-1] == "pin" else ("come back", "return")
        named = self._section_entries("virtual_models")
        for index, name in enumerate(names):
            trail = (*at, index) if isinstance(find(self.root, at)[0], Items) else at
            node = find(self.root, trail)[0]
            if name in virtual:
                model: CatalogModel | None = virtual[name].model
            elif name in models:
                model = models[name]
            else:
                if name not in named:  # else its own problem is reported
                    known = suggestion(name, [*models, *named], what="there is")
                    self._report(node, trail, f'no model "{name}"{known}')
                continue
            if model is not None and not model.config.enabled:
                self._report(node, trail, f'the model "{name}" is disabled, so it can\'t {verb}: enable it')
            elif model is not None and model.adapter.remote:
                self._report(node, trail, f'"{name}" runs elsewhere: it is never unloaded, and needs no {noun}')

    def _clients(self, names: Collection[str]) -> dict[str, ClientConfig]:
        """The profiles of clients. `names`: of all that may answer a request."""
        clients: dict[str, ClientConfig] = {}
        for name, node in self._section_entries("clients").items():
            trail = ("clients", name)
            if not (0 < len(name) <= CLIENT_LIMIT and name.isprintable()):
                self._report(node, trail, f"not a client: up to {CLIENT_LIMIT} characters that can be printed")
            config = self._validated(ClientConfig, node, trail)
            if config is not None:
                clients[name] = config
            at = node.entries.get("model") if isinstance(node, Table) else None
            if isinstance(at, Leaf) and isinstance(at.value, str) and at.value not in names:
                message = f'no model "{at.value}" answers{suggestion(at.value, names, what="there is")}'
                self._report(at, (*trail, "model"), message)
        return clients


def _adapter_messages(model: CatalogModel, own_runtimes_dir: Path) -> tuple[str, ...]:
    """The messages of the adapter's checks on this machine."""
    try:
        return model.adapter.check(model.config, runtimes_dir=own_runtimes_dir)
    except OSError as error:  # such as a folder that this user may not open
        return (f"{error.filename}: {error.strerror}",)


def _troubles(model: CatalogModel, messages: Sequence[str], node: Node, trail: Trail) -> tuple[Problem, ...]:
    """The adapter's messages as problems with their places, and with a remedy where one is known."""
    remedy = sources.remedy(model.id, model.config)
    hub_name = sources.hub_name(node) if isinstance(node, Table) else ""
    path = getattr(model.config, "path", None)
    is_gguf_file = isinstance(path, Path) and path.suffix.lower() == ".gguf" and not path.is_dir()
    if is_gguf_file and any(message.endswith(_NO_FOLDER) for message in messages):
        runtime = model.adapter.name
        advice = f"path: {path} is a GGUF file, and {runtime} loads folders; llama_server runs it: leave out runtime"
        messages = [advice if message.endswith(_NO_FOLDER) else message for message in messages]
        remedy = ""
    problems: list[Problem] = []
    for message in messages:
        ending = remedy or (hub_name if message.startswith("path") else "")
        problems.append(_problem_at_key(message + ending, node, trail))
    return tuple(problems)


def _scalars(entry: Node) -> Collection[JsonValue]:
    """The scalars of a table. A virtual model among its own scalars stands for the model of that name."""
    return [leaf.value for leaf in entry.entries.values() if isinstance(leaf, Leaf)] if isinstance(entry, Table) else ()


def _problem_at_key(message: str, node: Node, trail: Trail) -> Problem:
    """A problem at the place of the key with which an adapter's message begins, if the file has that key."""
    word = re.match(r"\W*(\w+)", message)
    key = word[1] if word else ""
    if isinstance(node, Table) and key in node.entries:
        node, trail = node.entries[key], (*trail, key)
        message = re.sub(r"^\W*\w+\W*\s+", "", message) or message
    return Problem(node.place, trail, message)


def _section_hint(name: str) -> str:
    """Advice about an unknown section, as the end of a sentence."""
    for section, model in (("server", ServerConfig), ("limits", LimitsConfig)):
        if name in model.model_fields:
            return f'; did you mean "{section}.{name}"?'
    if name in ModelConfig.model_fields or name in ("path", "cmd"):
        return "; the keys of a model stand under its name: models: {NAME: {path: …}}"
    return hint(name, SECTIONS) or suggestion(name, SECTIONS)


class MistakesError(ConfigError):
    """The mistakes in the configuration, each with its place."""

    def __init__(self, found: Iterable[Problem]) -> None:
        by_text = {str(problem): problem for problem in found}
        super().__init__(tuple(by_text))
        self.found = tuple(by_text.values())


def config_error(problems: list[Problem]) -> MistakesError:
    """The error that lists them in the order of the files, each once."""
    return MistakesError(sorted(problems, key=_position))


def _position(problem: Problem) -> tuple[int, int, int]:
    place = problem.place
    return list(Layer).index(place.source.layer), place.line, place.column
