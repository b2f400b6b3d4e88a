"""The demo: scripted models of a few MiB that every llama.cpp loads, and a configuration that serves them.

`llmux serve --demo` needs only `write_demo` and the embedded llama.cpp runtime.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Final

from supervisor.cli.demo import tiny

CONFIG_NAME: Final = "llmux.yaml"

_QUICK = tiny.Tiny(layers=1, heads=1, kv_heads=1, head=32)  # reads a chat program's 25 kB of tools in a second
MODELS: Final = (
    replace(_QUICK, name="tiny-chat"),
    replace(_QUICK, name="tiny-other", answer="Greetings from the other tiny model", seed=1),
    replace(_QUICK, name="tiny-embed", seed=2),
)


def write_demo(folder: Path) -> Path:
    """Write the models and their configuration into `folder`; returns the configuration's path.

    Takes a few dozen milliseconds. Raises OSError.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    for model in MODELS:
        tiny.write(folder / f"{model.name}.gguf", model)
    config = Path(shutil.copyfile(Path(__file__).with_name(CONFIG_NAME), folder / CONFIG_NAME))
    config.chmod(0o644)  # despite the umask: a file that others can write is refused
    return config
