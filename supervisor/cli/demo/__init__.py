"""The demo: scripted models of a few MiB that every llama.cpp loads, and a configuration that serves them.

`write_demo` is all that `llmux serve --demo` needs besides the embedded llama.cpp runtime.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from supervisor.cli.demo import tiny

CONFIG_NAME: Final = "llmux.yaml"

MODELS: Final = (
    tiny.Tiny(name="tiny-chat", layers=1),
    tiny.Tiny(name="tiny-other", layers=1, answer="Greetings from the other tiny model", seed=1),
    tiny.Tiny(name="tiny-embed", layers=1, seed=2),
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
    config.chmod(0o644)  # whatever the umask: what others can write is refused
    return config
