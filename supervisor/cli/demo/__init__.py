"""The demo: scripted models of a few MiB that every llama.cpp loads, and a configuration that serves them.

`write_demo` is all that `llmux serve --demo` needs besides the embedded llama.cpp runtime.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from supervisor.cli.demo import tiny

CONFIG_NAME: Final = "llmux.yaml"

MODELS: Final = {
    "chat": tiny.Tiny(name="tiny-chat"),
    "other": tiny.Tiny(name="tiny-other", answer="Greetings from the other tiny model", seed=1),
    "embed": tiny.Tiny(name="tiny-embed", seed=2),
}

_CONFIG: Final = """\
# Written by `llmux serve --demo`, and again at each start: copy it to keep changes.
models:
  tiny-chat:
    path: {chat}
    runtime: llama_server
    program: embedded
    n_ctx: 4096
    threads: 1
  tiny-other:
    path: {other}
    runtime: llama_server
    program: embedded
    n_ctx: 4096
    threads: 1
  tiny-embed-model:
    path: {embed}
    runtime: llama_server
    program: embedded
    type: embedding
    n_ctx: 2048
    threads: 1

virtual_models:
  Tiny-Thinking:
    model: tiny-chat
    enable_thinking: true
    description: Thinks first; calls the tool get_weather when it is offered.
  Tiny-Instruct:
    model: tiny-chat
    enable_thinking: false
    description: The same worker, answering at once.
  Tiny-Other:
    model: tiny-other
    enable_thinking: false
    description: Another model, in a worker of its own.
  tiny-embed:
    model: tiny-embed-model
    description: Embeddings.

limits:
  queue_per_model: 512
"""


def write_demo(folder: Path) -> Path:
    """Write the models and their configuration into `folder`; returns the configuration's path.

    Takes a few dozen milliseconds. Raises OSError.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for key, model in MODELS.items():
        path = folder / f"{model.name}.gguf"
        tiny.write(path, model)
        paths[key] = json.dumps(str(path))  # a JSON string is a YAML string, whatever is in it
    config = folder / CONFIG_NAME
    config.write_text(_CONFIG.format(**paths), encoding="utf-8")
    return config
