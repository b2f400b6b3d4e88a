"""Models in Ollama's format. A field stays empty if llmux doesn't know its value."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from hashlib import sha256
from typing import Final

from runtimes.base import Capabilities
from supervisor import catalog
from supervisor.catalog import CatalogModel
from supervisor.daemon.daemon import Daemon
from supervisor.dialects import chat
from supervisor.dialects.ollama import types
from supervisor.dialects.ollama.encode import timestamp
from supervisor.dialects.openai import LATEST, OPENAI
from supervisor.engine.status import ModelStatus

_MIB: Final = 1 << 20
_FOR_EVER_S: Final = 100 * 365 * 86_400  # for `expires_at` of a model without a planned unload
_UNKNOWN: Final = "unknown"  # architecture; names of other fields begin with it
_CHATS: Final = f"POST {chat.PATH}"
_EMBEDS: Final = "POST /v1/embeddings"


def find(daemon: Daemon, name: str) -> catalog.Route | None:
    """The model with this name; a client may have added `:latest` to it."""
    return daemon.catalog.route(OPENAI.model_name(name, lambda known: daemon.catalog.route(known) is not None))


def resolve(daemon: Daemon, name: str) -> catalog.Route:
    """Like `find`, but raises NotFoundError for an unknown name."""
    return find(daemon, name) or daemon.catalog.resolve(name)


def usable(rows: Iterable[catalog.Route]) -> list[catalog.Route]:
    """The models that chat or embed: Ollama's clients can't use other models."""
    return [row for row in rows if _CHATS in row.model.paths or _EMBEDS in row.model.paths]


def size_of(model: CatalogModel) -> int:
    """The bytes of a model's weights; 0 if unknown. Blocks: reads file sizes."""
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for file in model.adapter.weights(model.config))
    return 0


def list_entry(daemon: Daemon, public: str, model: CatalogModel, size: int) -> types.OllamaListedModel:
    """The entry in `/api/tags` for a public name, loaded or not."""
    name = _name_with_tag(daemon, public)
    return types.OllamaListedModel(name, name, _digest_of_name(name), _details(model), _start_time(daemon), size)


def loaded_entry(daemon: Daemon, row: catalog.Route, status: ModelStatus) -> types.OllamaLoadedModel:
    """The entry in `/api/ps` for a loaded model."""
    name, model = _name_with_tag(daemon, row.name), daemon.fleet.effective(row.model.id)
    on_gpus = {device.id for device in daemon.engine.devices() if not device.spec.takes_whole}
    leases = [(lease.device, lease.measured_mib or lease.mib) for lease in status.leases]
    return types.OllamaLoadedModel(
        name,
        name,
        _digest_of_name(name),
        _details(model),
        size=sum(mib for _, mib in leases) * _MIB,
        size_vram=sum(mib for device, mib in leases if device in on_gpus) * _MIB,
        expires_at=timestamp(time.time() + (_FOR_EVER_S if status.unload_s is None else status.unload_s)),
        context_length=_capabilities_of(model).context or 0,
    )


def shown_model(daemon: Daemon, row: catalog.Route) -> types.OllamaShown:
    """A model's capabilities. Clients look for the context below the architecture's name, so the answer always names one."""
    model = daemon.fleet.effective(row.model.id)
    known, is_chat = _capabilities_of(model), _CHATS in model.paths
    architecture = known.architecture or _UNKNOWN
    info: dict[str, str | int] = {"general.architecture": architecture}
    if known.context is not None:
        info[f"{architecture}.context_length"] = known.context
    has = {
        "completion": is_chat,
        "embedding": _EMBEDS in model.paths and model.config.type in {"embedding", "vision"},
        "vision": is_chat and "image" in known.modalities,
        "tools": is_chat and known.tools,
        "thinking": is_chat and known.thinking,
    }
    return types.OllamaShown(
        details=_details(model),
        model_info=info,
        capabilities=[name for name, can in has.items() if can],
        modified_at=_start_time(daemon),
    )


def _name_with_tag(daemon: Daemon, name: str) -> str:
    """The name with `:latest`: some clients (older versions of Open WebUI) add the tag and look for that name in the list."""
    has_tag = ":" in name.rpartition("/")[2] or daemon.catalog.route(name + LATEST) is not None
    return name if has_tag else name + LATEST


def _digest_of_name(name: str) -> str:
    """A stand-in for a digest: it depends on the name only."""
    return sha256(name.encode()).hexdigest()


def _start_time(daemon: Daemon) -> str:
    return timestamp(daemon.wall_time(daemon.started))


def _details(model: CatalogModel) -> types.OllamaDetails:
    family, form = _capabilities_of(model).architecture, "gguf" if model.config.runtime == "llama_server" else ""
    return types.OllamaDetails(format=form, family=family or "", families=[family] if family else [])


def _capabilities_of(model: CatalogModel) -> Capabilities:
    return model.known_capabilities or Capabilities(())
