"""A person's first configuration file: its content, and the function that writes it. Also the folder of packaged examples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from supervisor.errors import InvalidRequestError
from supervisor.host.store import files

_PACKAGED: Final = Path(__file__).parents[1] / "config"
EXAMPLES: Final = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[2] / "config"
SCHEMA: Final = "llmux.schema.json"
HEAD: Final = f"# yaml-language-server: $schema=./{SCHEMA}\n"
"""Lets editors complete and check the file, if the schema lies beside it."""

STARTER: Final = f"""{HEAD}\
# llmux's configuration. `llmux config example` explains every key; `llmux config check` finds every mistake in this file.
# A line that begins with "#" and a key is a setting: remove the "#" to use it.

# name: how to run it. `llmux add ORG/REPO-GGUF` enters a model of the hub here; `llmux remove NAME` takes it out.
models:
  #my-model:
    #path: ~/models/my-model-Q4_K_M.gguf
    #n_ctx: 16384

# Further names for a model, each with settings of its own for requests.
#virtual_models:
  #my-model-fast:
    #model: my-model
    #enable_thinking: false

#server:
  #host: 127.0.0.1  # any other than loopback needs keys: llmux keys add NAME --scope admin
  #port: 8081
"""


def write(path: Path, text: str) -> tuple[Path, ...]:
    """Write the configuration, readable for this user alone, since users add secrets to it; write the schema beside it.

    Returns the new files. Raises InvalidRequestError where the file exists already, OSError where it can't be written.
    """
    if os.path.lexists(path):
        raise InvalidRequestError(f"{path} is there already, and stays as it is.")
    schema = path.with_name(SCHEMA)
    new = {path: text} | ({} if os.path.lexists(schema) else {schema: (EXAMPLES / SCHEMA).read_text(encoding="utf-8")})
    for place, content in new.items():
        files.create(place, content)
    return tuple(new)
