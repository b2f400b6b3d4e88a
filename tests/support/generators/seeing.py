"""Writes a tiny model for pictures and texts: `python seeing.py FOLDER '{"kind": …}'`, in the environment of embeddings.

KIND is clip, siglip (pictures of one size; SigLIP 2 has such models, too), or siglip2 (pictures of any shape). The weights
are random and the same each time, and large enough for answers to differ clearly from picture to picture.
"""

import json
import string
import sys

import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
BYTES = {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
SIGLIP_WORDS = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4, **BYTES}
LETTERS = string.ascii_lowercase + string.digits + string.punctuation


def siglip_tokenizer(length: int):
    words = dict(SIGLIP_WORDS)
    for letter in ["▁", *LETTERS]:
        words[letter] = len(words)
    return transformers.Siglip2Tokenizer(vocab=words, merges=[], model_max_length=length)


def clip_tokenizer(length: int):
    words: dict[str, int] = {}
    for byte in sorted(ByteLevel.alphabet()):
        words |= {byte: len(words), f"{byte}</w>": len(words) + 1}
    for word in ("<|startoftext|>", "<|endoftext|>"):
        words[word] = len(words)
    return transformers.CLIPTokenizer(vocab=words, merges=[], model_max_length=length)


def made(kind: str):
    """The model, its tokenizer, its image processor."""
    if kind == "clip":
        tokenizer = clip_tokenizer(77)
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        texts = {**ENCODER, "vocab_size": len(tokenizer), "max_position_embeddings": 77, "projection_dim": 24, **ends}
        sees = {**ENCODER, "image_size": 32, "patch_size": 8, "projection_dim": 24}
        config = transformers.CLIPConfig(text_config=texts, vision_config=sees, projection_dim=24)
        size = {"shortest_edge": 32}
        images = transformers.CLIPImageProcessor(size=size, crop_size={"height": 32, "width": 32})
        return transformers.CLIPModel(config), transformers.CLIPProcessor(images, tokenizer)
    tokenizer = siglip_tokenizer(64)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    texts = {**ENCODER, "vocab_size": len(tokenizer), "max_position_embeddings": 64, **ends}
    if kind == "siglip":
        sees = {**ENCODER, "image_size": 32, "patch_size": 8}
        config = transformers.SiglipConfig(text_config=texts, vision_config=sees)
        images = transformers.SiglipImageProcessor(size={"height": 32, "width": 32})
        return transformers.SiglipModel(config), transformers.SiglipProcessor(images, tokenizer)
    sees = {**ENCODER, "patch_size": 8, "num_patches": 16}
    config = transformers.Siglip2Config(text_config=texts, vision_config=sees)
    images = transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16)
    return transformers.Siglip2Model(config), transformers.Siglip2Processor(images, tokenizer)


def main(folder: str, kind: str) -> None:
    torch.manual_seed(0)
    model, processor = made(kind)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.2)
            elif name == "logit_scale":
                weights.fill_(1.5)
            elif name == "logit_bias":
                weights.fill_(-0.5)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
