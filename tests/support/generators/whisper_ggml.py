"""The tiny Whisper of whisper.py in whisper.cpp's format, with a vocabulary as large as the real one.

whisper.cpp knows the special tokens by their numbers alone, so they have to be where Whisper's are: the text's up to 50256,
then the end, the start, the languages, the tasks and the times. What no script uses is zero.

The format (whisper.cpp's `whisper_model_load`), little-endian: a magic number, eleven sizes, the mel filters, the tokens,
and the tensors, each with its rank, its name's length, its type (0: float32, 1: float16), its sizes from the last on, its name
and its data.

Needs NumPy and nothing else.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from tests.support.generators import whisper

MAGIC, TEXTS, BINS = 0x67676D6C, 50257, 201
PLACES = {
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out",
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.k_proj": "cross_attn.key",
    "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "final_layer_norm": "mlp_ln",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
    "embed_positions.weight": "positional_embedding",
    "embed_tokens": "token_embedding",
}
FULL = ("conv1.bias", "conv2.bias", "positional_embedding")  # float32, whatever their rank


def model(path: Path) -> None:
    """The file."""
    texts, special = whisper.vocabulary(multilingual=True)
    said = [token for token in texts if token != "<|endoftext|>"]
    ids = {token: number for number, token in enumerate(said)}
    ids |= {f"<|unused {number}|>": number for number in range(len(said), TEXTS)}
    ids |= {"<|endoftext|>": TEXTS} | {token: TEXTS + 1 + number for number, token in enumerate(special)}
    tensors = whisper.weights(ids, multilingual=True)
    tensors["model.decoder.embed_tokens.weight"][len(said) : TEXTS] = 0.0
    with path.open("wb") as file:
        sizes = (len(ids), whisper.FRAMES, whisper.WIDTH, 2, 1, whisper.POSITIONS, whisper.WIDTH, 2, 1, whisper.MELS, 1)
        file.write(struct.pack("<12i", MAGIC, *sizes))
        file.write(struct.pack("<2i", whisper.MELS, BINS) + bytes(4 * whisper.MELS * BINS))
        file.write(struct.pack("<i", TEXTS))
        for token in list(ids)[:TEXTS]:
            text = token.replace("Ġ", " ").encode()
            file.write(struct.pack("<i", len(text)) + text)
        for name, tensor in tensors.items():
            _write(file, _name(name), _wide(name, tensor))


def _wide(name: str, tensor: np.ndarray) -> np.ndarray:
    """Feed-forward layers are four times as wide there: the further units do nothing."""
    more = 4 * whisper.WIDTH - whisper.INNER
    if ".fc1." in name:
        return np.pad(tensor, [(0, more)] + [(0, 0)] * (tensor.ndim - 1))
    return np.pad(tensor, [(0, 0), (0, more)]) if name.endswith("fc2.weight") else tensor


def _name(name: str) -> str:
    """As OpenAI's own checkpoints call it."""
    half, _, rest = name.removeprefix("model.").partition(".")
    for theirs, ours in PLACES.items():
        rest = rest.replace(theirs, ours)
    rest = rest.replace("layers.", "blocks.").replace("layer_norm", "ln_post" if half == "encoder" else "ln")
    return f"{half}.{rest}"


def _write(file, name: str, tensor: np.ndarray) -> None:
    is_full = tensor.ndim < 2 or name.endswith(FULL)
    tensor = tensor.astype(np.float32 if is_full else np.float16)
    if name.endswith(("conv1.bias", "conv2.bias")):
        tensor = tensor.reshape(-1, 1)
    text = name.encode()
    file.write(struct.pack("<3i", tensor.ndim, len(text), not is_full))
    file.write(struct.pack(f"<{tensor.ndim}i", *reversed(tensor.shape)) + text + tensor.tobytes())
