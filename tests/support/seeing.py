"""Tiny models for pictures and texts, made once per machine, with pictures for them and what transformers itself computes."""

from __future__ import annotations

import base64
import json
import struct
import subprocess
from pathlib import Path

from tests.support import fake_media
from tests.support.limits import LIMIT_S
from tests.support.made_once import generated, python

KINDS = ("clip", "siglip", "siglip2")

OWN = """
import io, json, sys, base64
import torch
from PIL import Image
from transformers import AutoModel, AutoProcessor
folder, asked = sys.argv[1], json.load(sys.stdin)
model, processor = AutoModel.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)
images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB") for url in asked["pictures"]]
given = processor.tokenizer(asked["texts"], padding="max_length", truncation=True, return_tensors="pt")
given |= processor.image_processor(images, return_tensors="pt")
with torch.inference_mode():
    found = model(**given)
logits = found.logits_per_image
scores = logits.softmax(1) if model.config.model_type == "clip" else logits.sigmoid()
rows = {"texts": found.text_embeds, "pictures": found.image_embeds, "scores": scores}
json.dump({name: row.tolist() for name, row in rows.items()}, sys.stdout)
"""


def model(kind: str) -> Path:
    """A CLIP, a SigLIP, or a SigLIP 2 for pictures of any shape."""
    return generated(kind, "seeing", "embeddings", kind=kind)


def picture(width: int, height: int, colour: tuple[int, int, int]) -> str:
    """A PNG's data URL: a colour that fades from left to right."""
    line = b"".join(bytes(part * (width - x) // width for part in colour) for x in range(width))
    return "data:image/png;base64," + base64.b64encode(fake_media.png(width, height, line)).decode()


def broken() -> str:
    """A TIFF's data URL. Its pixels are said to be where no file can have them."""
    tags = [(256, 4), (257, 4), (258, 8), (259, 1), (262, 1), (273, 2**64 - 1), (277, 1), (278, 4), (279, 16)]
    head = b"II+\0" + struct.pack("<HHQQ", 8, 0, 16, len(tags))
    body = b"".join(struct.pack("<HHQQ", tag, 16, 1, value) for tag, value in tags) + bytes(8)
    return "data:image/tiff;base64," + base64.b64encode(head + body).decode()


def own(kind: str, texts: list[str], pictures: list[str]) -> dict[str, list[list[float]]]:
    """What transformers computes of them: vectors of `texts` and `pictures`, and each picture's `scores` for the texts."""
    asked = json.dumps({"texts": texts, "pictures": pictures})
    command = [str(python("embeddings")), "-I", "-c", OWN, str(model(kind))]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return json.loads(done.stdout)
