"""Write a random Chatterbox checkpoint, run by the runtime's own Python: `write_chatterbox.py FOLDER '{"small": true}'`.

`small` shrinks the token model to one thin layer; the process that loads it must do the same (see `shrink`). The rest has
no size settings: 1.06 GB with the whole token model, about half without.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from chatterbox.models.s3gen import S3Gen
from chatterbox.models.t3 import T3, llama_configs
from chatterbox.models.voice_encoder import VoiceEncoder
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

START = 255


def shrink() -> None:
    """One thin layer, and four seconds of speech at most: random weights find no end, and the rest is slow."""
    llama_configs.LLAMA_CONFIGS["Llama_520M"].update(intermediate_size=64, num_hidden_layers=1)
    whole = T3.inference
    T3.inference = lambda self, **keywords: whole(self, **{**keywords, "max_new_tokens": 100})


def write(folder: Path) -> None:
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in (("ve", VoiceEncoder), ("t3_cfg", T3), ("s3gen", S3Gen)):
        state = {key: value.contiguous().clone() for key, value in make().state_dict().items()}
        save_file(state, folder / f"{name}.safetensors")
    special = ["[STOP]", "[UNK]", "[SPACE]", "[PAD]", "[SEP]", "[CLS]", "[MASK]"]
    vocabulary = {word: place for place, word in enumerate([*special, *map(chr, range(33, 127))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"[START]": START}, merges=[], unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[STOP]", "[UNK]", "[SPACE]", "[START]"])
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    if json.loads(sys.argv[2])["small"]:
        shrink()
    write(Path(sys.argv[1]))
