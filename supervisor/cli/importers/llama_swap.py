"""llama-swap's config.yaml: models with their commands, macros, aliases, filters, groups, hooks and peers.

A command that runs llama-server with a file becomes our llama_server runtime; any other command is run unchanged. llama-swap
swaps by groups, llmux by memory: settings with the same meaning here are imported, all others are noted.

Macros, `${name}` anywhere in a value, are defined for all models or for one, and in terms of each other. Filters remove
fields from requests and set others, for all names of a model or for one: they become `strip` and `force` of a virtual model
for each name.

Peers are other servers; each of their models becomes an `openai_remote` model. Its name is `peer/model`, and also `model` where
no other model has that name. llama-swap sends every request for such a model to the peer, so each gets `allow_remote`.
Keys are not copied: where the source names an environment variable, that variable is used; else one is made up and noted.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final
from urllib.parse import urlsplit

from pydantic import JsonValue

from runtimes.command import containers
from runtimes.device_kind import CUDA, HOST
from supervisor.catalog.document.document import whole_number
from supervisor.cli.importers.draft import Draft, Values, guess_type, list_of, object_of, text_of
from supervisor.cli.importers.llama_options import Options
from supervisor.errors import ConfigError

_KNOWN: Final = frozenset(
    {"macros", "cmd", "cmdStop", "proxy", "checkEndpoint", "ttl", "aliases", "env", "name", "description", "unlisted"}
    | {"useModelName", "concurrencyLimit", "filters", "unloadTimeout", "capabilities", "healthCheckTimeout"}
    | {"sendLoadingState"}
)
_KNOWN_AT_TOP: Final = frozenset(
    {"macros", "models", "peers", "groups", "hooks", "globalTTL", "healthCheckTimeout", "includeAliasesInList"}
    | {"logLevel", "apiKeys", "unloadTimeout", "routing", "sendLoadingState", "selectors"}
)
_ELSEWHERE: Final = {
    "metadata": "llmux shows what it knows of a model at GET /v1/admin/models",
    "timeouts": "for all models together: limits.connect_s, limits.first_byte_s, limits.stream_idle_s",
    "compat": "llmux passes requests on over HTTP only",
}
_LOST_SETTINGS: Final = {
    "startPort": "workers' ports are those from server.worker_port_first to server.worker_port_last",
    "logTimeFormat": "see server.log_format",
    "logToStdout": "llmux logs to standard error, its workers to files",
    "metricsMaxInMemory": "history is kept for half an hour; GET /metrics is for Prometheus",
    "captureBuffer": "llmux keeps no requests",
    "matrix": "llmux decides by memory; limits.max_loaded, `pin` and `priority` say what may stay",
    "profiles": "a virtual model stands for one model, whoever asks",
    "logRequests": "llmux logs a line for each request",
}
_KNOWN_OF_FILTERS: Final = frozenset({"stripParams", "strip_params", "setParams", "set_params", "setParamsByID"})
_VARIABLE: Final = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
_TIMEOUTS: Final = {"connect": "connect_s", "responseHeader": "first_byte_s"}
_KNOWN_OF_PEER: Final = frozenset({"proxy", "apiKey", "models", "filters", "timeouts"})
_START_MACROS: Final = frozenset({"PORT", "PID"})
"""Macros that get their values when a worker starts: they stay unfilled."""
_MACRO: Final = re.compile(r"\$\{([A-Za-z0-9_.-]+)\}")
_MOST_FILLS: Final = 16

_Definitions = Mapping[str, JsonValue]


def convert(root: Mapping[str, JsonValue], environ: Mapping[str, str]) -> Draft:
    """The draft. Raises ConfigError for mistakes that llama-swap itself would refuse."""
    return _Conversion(root, environ).draft


class _Conversion:
    def __init__(self, root: Mapping[str, JsonValue], environ: Mapping[str, str]) -> None:
        self.draft = Draft()
        self._root = root
        self._macros = _Macros(environ)
        self._problems = self._macros.problems
        self._names: dict[str, str] = {}  # llama-swap's name or alias → our model's name
        models = root.get("models") or {}
        if not isinstance(models, dict) or not (models or root.get("peers")):
            raise ConfigError(("there are no models",))
        self.draft.reserve(models)
        self._names = {name: self.draft.name(name) for name in models}
        for name, values in models.items():
            if isinstance(values, dict):
                self._convert_model(name, values)
            else:
                self._problems.append(f"models.{name}: expected a mapping")
        if self._problems:
            raise ConfigError(tuple(self._problems))
        self._convert_settings()
        self._convert_groups()
        self._convert_preload()
        _add_peers(self.draft, root.get("peers"), self._macros, _macros_of(root.get("macros")))
        if self._problems:
            raise ConfigError(tuple(self._problems))
        self._convert_selectors()
        self.draft.list_models()

    def _convert_model(self, foreign_name: str, values: Mapping[str, JsonValue]) -> None:
        name, where = self._names[foreign_name], f"models.{foreign_name}"
        known = {
            **_macros_of(self._root.get("macros")),
            **_macros_of(values.get("macros")),
            "MODEL_ID": foreign_name,
        }
        filled = {
            key: self._macros.fill(
                _without_comments(item) if key in {"cmd", "cmdStop"} else item, known, f"{where}.{key}"
            )
            for key, item in values.items()
            if key != "macros"
        }
        words = _command_words(str(filled.get("cmd", "")))
        if not words:
            self._problems.append(f"{where}.cmd: is missing")
            return
        self.draft.models[name] = {}
        if title := filled.get("name"):
            self.draft.comment(name, text_of(title))
        words, more = _without_env(words)
        options = Options.read(words[1:])
        if "llama-server" in PurePath(words[0]).name and "path" in options.keys:
            self._convert_llama_server(name, where, words[0], options, filled)
        else:
            self._convert_command(name, where, words, filled)
        self._convert_environment(name, where, list_of(filled.get("env")), more)
        self._convert_lifetime(name, where, filled)
        self._add_names(name, foreign_name, where, filled)
        _apply_filters(self.draft, name, foreign_name, where, filled.get("filters"))
        self.draft.spread(name)
        self.draft.lose_unknown(f"{where}.", filled, _KNOWN, _ELSEWHERE, model=name)

    def _convert_llama_server(
        self, name: str, where: str, program: str, options: Options, filled: Mapping[str, JsonValue]
    ) -> None:
        model = self.draft.models[name]
        if "/" in program:
            options.keys["binary"] = program
        options.give(self.draft, name, f"{where}.cmd")
        if "n_ctx" not in model:
            self.draft.look(
                f"{where}.cmd",
                "names no --ctx-size: n_ctx is chosen to fit the device; llmux config check says how",
                model=name,
            )
        if filled.get("checkEndpoint", "/health") != "/health":
            self.draft.lose(f"{where}.checkEndpoint", "llama-server is asked at /health", model=name)
        if filled.get("cmdStop"):
            self.draft.lose(f"{where}.cmdStop", "llama-server is stopped by SIGTERM", model=name)

    def _convert_command(self, name: str, where: str, words: list[str], filled: Mapping[str, JsonValue]) -> None:
        model = self.draft.models[name]
        if kind := guess_type(words[0]):
            model["type"] = kind
        words = self._with_port(name, where, words, filled.get("proxy"))
        model["cmd"] = [_with_placeholder(word) for word in words]
        if "enabled" not in model:
            why = "without vram_mib its memory is a guess until the first load measures it"
            if containers.is_container(words):
                why = "llmux can't measure the memory of a container: set vram_mib"
                for problem in containers.problems(words, "${PORT}"):
                    self.draft.look(f"{where}.cmd", problem, model=name)
            self.draft.look(f"{where}.cmd", why, model=name)
        check = filled.get("checkEndpoint")
        if check == "none":
            self.draft.lose(f"{where}.checkEndpoint", "llmux has to know when it is ready: set health_path", model=name)
        elif check is not None:
            model["health_path"] = check
        if filled.get("useModelName"):
            model["upstream_model"] = filled["useModelName"]
        inputs = [
            kind
            for kind in list_of(object_of(filled.get("capabilities")).get("in"))
            if kind in ("text", "image", "audio")
        ]
        if inputs not in ([], ["text"]):
            model["modalities"] = list[JsonValue](inputs)
        stop = str(filled.get("cmdStop") or "")
        if "${PID}" in stop:
            self.draft.lose(f"{where}.cmdStop", "llmux signals the whole process tree itself", model=name)
        elif stop_words := _command_words(stop):
            model["stop_cmd"] = [_with_placeholder(word) for word in stop_words]

    def _with_port(self, name: str, where: str, words: list[str], proxy: JsonValue) -> list[str]:
        """The command with a placeholder for its port. A model whose command can't have one is switched off."""
        model = self.draft.models[name]
        address = str(proxy or "").replace("${PORT}", "0")
        try:
            url = urlsplit(address)
            fixed = url.port
        except ValueError:
            self._problems.append(f"{where}.proxy: {proxy} is no URL")
            return words
        if url.hostname not in {None, "localhost", "127.0.0.1", "::1"}:
            model["enabled"] = False
            self.draft.lose(f"{where}.proxy", "llmux reaches its workers on this machine only", model=name)
        elif not any("${PORT}" in word for word in words):
            port = str(fixed)
            if fixed is not None and any(port in re.split(r"[=:]", word) for word in words):
                words = [re.sub(rf"(?<!\d){port}(?!\d)", "${PORT}", word) for word in words]
                self.draft.look(f"{where}.proxy", f"port {port} became one that llmux chooses", model=name)
            else:
                model["enabled"] = False
                self.draft.lose(f"{where}.cmd", "llmux chooses the port: say where with ${port}", model=name)
        elif url.path not in {"", "/"}:
            self.draft.lose(
                f"{where}.proxy", f"requests go to the paths they came for, not below {url.path}", model=name
            )
        return words

    def _convert_environment(self, name: str, where: str, entries: list[JsonValue], more: dict[str, str]) -> None:
        model, env = self.draft.models[name], dict[str, str]()
        for entry in entries:
            variable, equals, value = str(entry).partition("=")
            if equals:
                env[variable] = value
            else:
                self.draft.lose(f"{where}.env", f"{variable} has no value", model=name)
        env |= more
        visible = env.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            indexes = [whole_number(part.strip()) for part in visible.split(",") if part.strip()]
            known = [index for index in indexes if index is not None]
            if known == indexes:
                model["devices"] = [CUDA.device_id(index) for index in known] or [HOST.device_id()]
                if len(indexes) > 1:
                    model["gpus"] = len(indexes)
                    self.draft.look(
                        f"{where}.env", "it shares all of these devices; without gpus it gets one", model=name
                    )
            else:
                self.draft.lose(f"{where}.env", f"CUDA_VISIBLE_DEVICES={visible}: name devices as gpu0", model=name)
        if folders := env.pop("LD_LIBRARY_PATH", None):
            model["library_path"] = [folder for folder in folders.split(":") if folder]
        if env:
            is_command = "cmd" in model
            model["env"] = {key: _with_placeholder(value) if is_command else value for key, value in env.items()}

    def _convert_lifetime(self, name: str, where: str, filled: Mapping[str, JsonValue]) -> None:
        model = self.draft.models[name]
        ttl = filled.get("ttl", -1)
        seconds = self._root.get("globalTTL", 0) if ttl == -1 else ttl
        if isinstance(seconds, int | float) and seconds > 0:
            model["keep_alive_s"] = seconds
        if grace := filled.get("unloadTimeout") or self._root.get("unloadTimeout"):
            model["grace_s"] = grace
        if limit := filled.get("healthCheckTimeout") or self._root.get("healthCheckTimeout"):
            model["startup_limit_s"] = limit
        if limit := filled.get("concurrencyLimit"):
            model["target_inflight"] = limit
            self.draft.look(f"{where}.concurrencyLimit", "requests beyond it wait instead of getting 429", model=name)
        if filled.get("sendLoadingState", shared := self._root.get("sendLoadingState") is True) is not shared:
            self.draft.lose(f"{where}.sendLoadingState", "is said for all models: server.load_feedback", model=name)

    def _add_names(self, name: str, foreign_name: str, where: str, filled: Mapping[str, JsonValue]) -> None:
        unlisted = filled.get("unlisted") is True
        if unlisted:
            self.draft.models[name]["public"] = False
        if description := filled.get("description"):
            self.draft.virtual(name, name)["description"] = description
        for entry in list_of(filled.get("aliases")):
            alias = entry.get("id") if isinstance(entry, dict) else entry
            if not isinstance(alias, str) or not alias or alias == foreign_name:
                continue
            if alias in self._names:
                self._problems.append(f"{where}.aliases: {alias} is there already")
                continue
            self._names[alias] = name
            ours = self.draft.virtual(self.draft.name(alias), name)
            if isinstance(entry, dict) and (about := entry.get("description") or entry.get("name")) and about != alias:
                ours["description"] = about
            is_hidden = isinstance(entry, dict) and entry.get("unlisted") is True
            if is_hidden or unlisted or self._root.get("includeAliasesInList") is not True:
                self.draft.look(f"{where}.aliases", f"{alias} is in the list of models now", model=name)

    def _convert_settings(self) -> None:
        level = self._root.get("logLevel")
        if isinstance(level, str):
            self.draft.server["log_level"] = "warning" if level == "warn" else level
        if self._root.get("sendLoadingState") is True:
            self.draft.server["load_feedback"] = True
        if list_of(self._root.get("apiKeys")):
            self.draft.lose("apiKeys", "are not copied; make your clients new ones with: llmux keys add")
        self.draft.lose_unknown("", self._root, _KNOWN_AT_TOP, _LOST_SETTINGS)

    def _convert_groups(self) -> None:
        routing = object_of(self._root.get("routing"))
        router, scheduler = object_of(routing.get("router")), object_of(routing.get("scheduler"))
        settings = object_of(router.get("settings"))
        by_matrix = "matrix" in self._root or router.get("use") == "matrix"
        if router.get("use") == "matrix":
            self.draft.lose("routing.router.settings.matrix", _LOST_SETTINGS["matrix"])
        if object_of(object_of(scheduler.get("settings")).get("fifo")).get("priority"):
            why = "requests say their priority (X-Priority); `priority` of a model says what is evicted last"
            self.draft.lose("routing.scheduler.settings.fifo.priority", why)
        groups = object_of(self._root.get("groups") or settings.get("groups"))
        if by_matrix or not groups:
            if len(self.draft.models) > 1 and not by_matrix:
                advice = "for one at a time: limits.max_loaded: {llm: 1}"
                self.draft.look("models", f"stay loaded as long as their memory isn't needed; {advice}")
            return
        for title, group in groups.items():
            if isinstance(group, dict):
                self._convert_group(f"groups.{title}", group)

    def _convert_group(self, where: str, group: Mapping[str, JsonValue]) -> None:
        members = [self._names[str(m)] for m in list_of(group.get("members")) if str(m) in self._names]
        swap, exclusive = group.get("swap", True) is not False, group.get("exclusive", True) is not False
        if swap and len(members) > 1:
            types = {str(self.draft.models[member].get("type", "llm")) for member in members}
            everyone = {name for name, model in self.draft.models.items() if model.get("type", "llm") in types}
            if len(types) == 1 and everyone == set(members):
                self.draft.limits["max_loaded"] = {**object_of(self.draft.limits.get("max_loaded")), types.pop(): 1}
            else:
                self.draft.lose(f"{where}.swap", "one at a time is said by type (limits.max_loaded), not by group")
        if exclusive:
            self.draft.look(f"{where}.exclusive", "others have to go only if their memory is needed")
        if group.get("persistent") is True:
            if swap and len(members) > 1:
                self.draft.lose(f"{where}.persistent", "members that swap with each other can't be pinned")
            for member in members if not swap or len(members) == 1 else []:
                self.draft.models[member]["pin"] = True

    def _convert_selectors(self) -> None:
        """Make a task of each selector. Requests reach the task by its bare name, too."""
        for foreign_name, values in object_of(self._root.get("selectors")).items():
            where, selector = f"selectors.{foreign_name}", object_of(values)
            names = [self.draft.name(text_of(target)) for target in list_of(selector.get("targets"))]
            strategy = selector.get("strategy", "warm")
            if strategy == "pin":
                for name in names[1:]:
                    self.draft.lose(f"{where}.targets", f"{name} never answered: pin takes the first")
                del names[1:]
            elif strategy != "warm":
                why = "a loaded candidate answers, however many wait for it; see `replicas` for several workers of one model"
                self.draft.lose(f"{where}.strategy", f"{strategy}: {why}")
            task = self.draft.tasks[self.draft.name(foreign_name)] = {"candidates": list[JsonValue](names)}
            if description := selector.get("description") or selector.get("name"):
                task["description"] = text_of(description)
            if selector.get("unlisted") is True:
                self.draft.look(f"{where}.unlisted", "tasks are in the list of models")
            known = {"strategy", "targets", "name", "description", "unlisted"}
            self.draft.lose_unknown(f"{where}.", selector, known, _ELSEWHERE | {"settings": "is the strategy's"})

    def _convert_preload(self) -> None:
        for foreign_name in list_of(object_of(object_of(self._root.get("hooks")).get("on_startup")).get("preload")):
            if name := self._names.get(str(foreign_name)):
                self.draft.models[name]["preload"] = True
            else:
                self.draft.lose("hooks.on_startup.preload", f"there is no model {foreign_name}")


def _macros_of(value: JsonValue) -> dict[str, JsonValue]:
    """The macros of a `macros:` key: a mapping, or a list of mappings."""
    match value:
        case dict():
            return value
        case list():
            return {key: item for entry in value if isinstance(entry, dict) for key, item in entry.items()}
        case _:
            return {}


class _Macros:
    """Fills in macros. `problems` are mistakes that llama-swap would refuse, too."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.problems: list[str] = []
        self._environ = environ

    def fill(self, value: JsonValue, known: _Definitions, where: str) -> JsonValue:
        """The value with all macros filled in. A text that consists of one macro becomes the macro's value, of any type."""
        match value:
            case str():
                return self._fill_text(value, known, where)
            case list():
                return [self.fill(item, known, where) for item in value]
            case dict():
                return {str(self.fill(key, known, where)): self.fill(item, known, where) for key, item in value.items()}
            case _:
                return value

    def _fill_text(self, text: str, known: _Definitions, where: str) -> JsonValue:
        if (whole := _MACRO.fullmatch(text)) and not isinstance(known.get(whole[1]), str | None):
            return known[whole[1]]
        for _ in range(_MOST_FILLS):
            filled = _MACRO.sub(lambda match: self._macro_value(match[1], known, where), text)
            if filled == text:
                return text
            text = filled
        self.problems.append(f"{where}: macros that contain each other")
        return text

    def _macro_value(self, name: str, known: _Definitions, where: str) -> str:
        if name in _START_MACROS:
            return f"${{{name}}}"
        if name in known:
            return text_of(known[name])
        variable = name.removeprefix("env.")
        if variable in self._environ and variable != name:
            return self._environ[variable]
        what = f"there is no macro {name}" if variable == name else f"the environment variable {variable} is not set"
        self.problems.append(f"{where}: {what}")
        return ""


def _apply_filters(draft: Draft, name: str, foreign_name: str, where: str, filters: JsonValue) -> None:
    """Add the filters of a model, once all its other names are known. `foreign_name` is its name in llama-swap."""
    filters = object_of(filters)
    strip = filters.get("stripParams") or filters.get("strip_params") or ""
    fields = strip if isinstance(strip, list) else str(strip).split(",")
    stripped = [field for part in fields if (field := str(part).strip()) and field != "model"]
    force = _forceable_fields(draft, name, where, filters.get("setParams") or filters.get("set_params"))
    own = {
        name if public == foreign_name else draft.name(public): _forceable_fields(draft, name, where, given)
        for public, given in object_of(filters.get("setParamsByID")).items()
    }
    aliases = [public for public, virtual in draft.virtual_models.items() if virtual["model"] == name]
    for public in dict.fromkeys([name, *aliases, *own]):
        if stripped:
            draft.virtual(public, name)["strip"] = list(stripped)
        if public in own:
            draft.virtual(public, name)
        draft.merge(public, name, "force", force | own.get(public, {}))
    draft.lose_unknown(f"{where}.filters.", filters, _KNOWN_OF_FILTERS, model=name)


def _peer_filters(filters: JsonValue, foreign_name: str) -> JsonValue:
    """One model's filters, from those of its peer. Fields set for the model's name count for all its names."""
    if not isinstance(filters, dict) or "setParamsByID" not in filters:
        return filters
    shared = {key: value for key, value in filters.items() if key not in {"setParams", "set_params", "setParamsByID"}}
    everybody = object_of(filters.get("setParams") or filters.get("set_params"))
    mine = object_of(object_of(filters["setParamsByID"]).get(foreign_name))
    return {**shared, "setParams": {**everybody, **mine}}


def _forceable_fields(draft: Draft, name: str, where: str, value: JsonValue) -> Values:
    fields = object_of(value)
    for field in [field for field in fields if field in {"model", "stream"}]:
        draft.lose(f"{where}.filters", f'"{field}" decides who answers, and how', model=name)
    return {key: value for key, value in fields.items() if key not in {"model", "stream"}}


def _add_peers(draft: Draft, peers: JsonValue, macros: _Macros, known: _Definitions) -> None:
    """Add the models of all peers, after all other models. Mistakes that llama-swap would refuse go to `macros.problems`."""
    if not peers:
        return
    if not isinstance(peers, dict):
        macros.problems.append("peers: expected a mapping")
        return
    offered: dict[str, list[str]] = {}
    for peer, values in peers.items():
        models = values.get("models") if isinstance(values, dict) else None
        if not isinstance(values, dict) or not values.get("proxy") or not isinstance(models, list) or not models:
            macros.problems.append(f"peers.{peer}: expected a mapping with proxy and models")
        else:
            offered[peer] = [str(macros.fill(model, known, f"peers.{peer}.models")) for model in models]
    often = Counter(model for listed in offered.values() for model in set(listed))
    for peer, listed in offered.items():
        values = peers[peer]
        assert isinstance(values, dict)
        _add_peer(draft, peer, values, {model: often[model] == 1 for model in listed}, macros, known)


def _add_peer(
    draft: Draft,
    peer: str,
    values: Mapping[str, JsonValue],
    models: Mapping[str, bool],
    macros: _Macros,
    known: _Definitions,
) -> None:
    """Add the models of one peer. `models`: each model's name, and whether no other peer has a model of that name."""
    where = f"peers.{peer}"
    address = str(macros.fill(values["proxy"], known, f"{where}.proxy"))
    if not address.startswith(("http://", "https://")):
        draft.lose(where, f"llmux reaches others by http: or https:, not by {address.partition(':')[0]}:")
        return
    remote: Values = {"runtime": "openai_remote", "base_url": f"{address.rstrip('/')}/v1"}
    if key := values.get("apiKey"):
        variable = _variable_of_key(str(key), known)
        if variable is None:
            variable = f"{re.sub(r'[^A-Z0-9]+', '_', peer.upper()).strip('_') or 'PEER'}_API_KEY"
            variable = f"PEER_{variable}" if variable[0].isdigit() else variable
            draft.look(f"{where}.apiKey", f"is not copied: put it into the daemon's environment, as {variable}")
        remote["api_key_env"] = variable
    timeouts = object_of(values.get("timeouts"))
    draft.lose_unknown(f"{where}.timeouts.", timeouts, _TIMEOUTS)
    for name, key in _TIMEOUTS.items():
        if isinstance(limit := timeouts.get(name), int | float) and limit > 0:
            remote[key] = limit
    remote["allow_remote"] = True
    draft.look(where, "its models are sent every request that names them, as before: allow_remote")
    draft.lose_unknown(f"{where}.", values, _KNOWN_OF_PEER)
    for model, is_only in models.items():
        name = draft.name(f"{peer}/{model}")
        if name in draft.models or name in draft.virtual_models:
            macros.problems.append(f"{where}.models: {name} is there already")
            continue
        short = draft.name(model)
        if is_only and short not in draft.models and short not in draft.virtual_models:
            draft.virtual(short, name)
        draft.models[name] = {**remote, "upstream_model": model}
        rules = _peer_filters(macros.fill(values.get("filters"), known, f"{where}.filters"), model)
        _apply_filters(draft, name, model, where, rules)


def _variable_of_key(key: str, known: _Definitions) -> str | None:
    """The environment variable that an API key comes from, directly or by macros; None: the file contains the key itself."""
    for _ in range(len(known) + 1):
        if (found := _VARIABLE.fullmatch(key)) is not None:
            return found[1]
        if (macro := _MACRO.fullmatch(key)) is None or not isinstance(value := known.get(macro[1]), str):
            return None
        key = value
    return None


def _without_comments(value: JsonValue) -> JsonValue:
    """A command without comment lines, where undefined macros are allowed."""
    if not isinstance(value, str):
        return value
    return "\n".join(line for line in value.splitlines() if not line.lstrip().startswith("#"))


def _command_words(command: str) -> list[str]:
    """A command of one or several lines, without comments and continuation marks. Raises ConfigError."""
    text = " ".join(line.rstrip().removesuffix("\\") for line in str(_without_comments(command)).splitlines())
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError((f"{text[:80]}: {error}",)) from error


def _without_env(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The words without a leading `env A=1`, and its variables."""
    if words[0] != "env":
        return words, {}
    rest = iter(words[1:])
    env: dict[str, str] = {}
    for word in rest:
        name, equals, value = word.partition("=")
        if not equals:
            return [word, *rest], env
        env[name] = value
    return words, {}


def _with_placeholder(word: str) -> str:
    """`${PORT}` becomes our placeholder; every other `${` is escaped."""
    return "${port}".join(part.replace("${", "$${") for part in word.split("${PORT}"))
