"""The model classes of the `chatterbox` library, replaced: the same calls, a tone in place of speech.

`install(site_packages)` writes it as a package there, `environment(folder)` makes a venv with it and what its worker needs
beside it. What it speaks can be told apart by ear and by test: a tone of 0.05 s a character, its pitch by voice (the clip's
length), its loudness by seed. A character is a token of text and two of speech.
"""

from __future__ import annotations

from pathlib import Path

from tests.support import environments

SOURCE = '''
import time
from pathlib import Path
import torch
from safetensors.torch import load_file

LANGUAGES = {"en": "English", "de": "German"}


class Conditionals:
    def __init__(self, pitch):
        self.pitch = pitch


class Tokens:
    """Where the real one has its token model."""

    pace_s = 0.005  # a token

    def __init__(self):
        self.tfmr = torch.nn.Identity()

    def inference(self, *, text_tokens):
        for _ in range(text_tokens.shape[-1]):
            self.tfmr(torch.zeros(1))
            time.sleep(self.pace_s)
        return torch.zeros(1, 2 * text_tokens.shape[-1])


class Model:
    sr = 24000
    weights = "t3_cfg.safetensors"
    token_model = Tokens

    def __init__(self, folder):
        self.t3 = self.token_model()
        self.kept = load_file(Path(folder) / self.weights)
        self.conds = Conditionals(200) if (Path(folder) / "conds.pt").exists() else None

    @classmethod
    def from_local(cls, folder, device):
        assert device == "cpu"
        return cls(folder)

    def prepare_conditionals(self, clip, exaggeration=0.5, **keywords):
        size = Path(clip).stat().st_size
        assert size > 100, "Audio prompt must be longer than 5 seconds!"
        print("prepared", Path(clip).name, keywords, flush=True)
        self.conds = Conditionals(200 + size % 1000)

    def generate(self, text, repetition_penalty=1.2, min_p=0.05, top_p=1.0, audio_prompt_path=None, exaggeration=0.5,
                 cfg_weight=0.5, temperature=0.8, **further):
        print("spoke", repr(text), exaggeration, cfg_weight, further, flush=True)
        self.speak(text_tokens=torch.zeros(1, len(text)))
        time_s = torch.arange(int(0.05 * len(text) * self.sr)) / self.sr
        return (0.5 + 0.4 * torch.rand(1)) * torch.sin(2 * torch.pi * self.conds.pitch * time_s)[None]

    def speak(self, **tokens):
        return self.t3.inference(**tokens)
'''

MODULES = {
    "__init__.py": "",
    "base.py": SOURCE,
    "tts.py": "from chatterbox.base import Model\nclass ChatterboxTTS(Model):\n    pass\n",
    "mtl_tts.py": (
        "from chatterbox.base import LANGUAGES, Model\n"
        "class ChatterboxMultilingualTTS(Model):\n"
        "    weights = 't3_mtl23ls_v2.safetensors'\n"
        "    @classmethod\n    def get_supported_languages(cls):\n        return dict(LANGUAGES)\n"
        "    def generate(self, text, language_id, **further):\n"
        "        print('language', language_id, flush=True)\n"
        "        return super().generate(text, **further)\n"
    ),
    "tts_turbo.py": (
        "from chatterbox.base import Model, Tokens\n"
        "class Quick(Tokens):\n"
        "    pace_s = 0.001\n"
        "    inference_turbo = Tokens.inference\n"
        "class ChatterboxTurboTTS(Model):\n"
        "    weights = 't3_turbo_v1.safetensors'\n"
        "    token_model = Quick\n"
        "    def speak(self, **tokens):\n"
        "        return self.t3.inference_turbo(**tokens)\n"
    ),
}


def install(site_packages: Path) -> None:
    """Write the package."""
    folder = site_packages / "chatterbox"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in MODULES.items():
        (folder / name).write_text(text)


def environment(folder: Path) -> Path:
    """A venv there; its Python."""
    install(environments.borrowing(folder))
    return folder / "bin" / "python"
