"""A tiny CohereAsr checkpoint that says " one two three" for whatever it hears; made the way of whisper.py.

python cohere.py FOLDER '{}'       in an environment that has transformers
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    CohereAsrConfig,
    CohereAsrForConditionalGeneration,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

WIDTH = 64
WORDS = ["▁one", "▁two", "▁three"]
CODES = "ar de el en es fr it ja ko nl pl pt vi zh"
SPECIAL = ["<unk>", "<pad>", "<|endoftext|>", "<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>"]
SPECIAL += [f"<|{code}|>" for code in CODES.split()]
SPECIAL += ["<|pnc|>", "<|nopnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>"]


def write(folder: str) -> None:
    torch.manual_seed(0)
    ids = {token: number for number, token in enumerate([*SPECIAL, "▁", *WORDS])}
    end = ids["<|endoftext|>"]
    encoder = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = CohereAsrConfig(
        encoder_config={**encoder, "subsampling_conv_channels": 8, "model_type": "parakeet_encoder"},
        vocab_size=len(ids),
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        pad_token_id=ids["<pad>"],
        eos_token_id=end,
        bos_token_id=ids["<|startoftranscript|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"],
        tie_word_embeddings=True,
    )
    model = CohereAsrForConditionalGeneration(config)
    decoder = model.model.decoder
    with torch.no_grad():
        vectors = torch.randn(len(ids), WIDTH)
        vectors = torch.nn.functional.normalize(vectors - vectors.mean(1, keepdim=True), dim=-1)
        decoder.embed_tokens.weight.copy_(vectors)
        decoder.pos_emb.weight.zero_()
        layer = decoder.layers[0]
        for attention in (layer.self_attn, layer.encoder_attn):
            attention.o_proj.weight.zero_()
            attention.o_proj.bias.zero_()
        first, second = (module for module in layer.mlp.modules() if isinstance(module, torch.nn.Linear))
        for tensor in (first.weight, second.weight):
            tensor.zero_()
        first.bias.fill_(-10)
        second.bias.copy_(16 * vectors[end])  # where the script says nothing else
        said = ["<|nodiarize|>", *WORDS]
        for unit, (token, following) in enumerate(itertools.pairwise(said)):
            first.weight[unit], first.bias[unit] = 8 * vectors[ids[token]], -51.0
            second.weight[:, unit] = 4 * vectors[ids[following]]
        decoder.norm.weight.fill_(4.0)
        model.proj_out.bias.zero_()
    model.generation_config = GenerationConfig(
        pad_token_id=ids["<pad>"], eos_token_id=end, decoder_start_token_id=ids["<|startoftranscript|>"]
    )
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[3:],
    )
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    # As its processor saves it, which wants librosa.
    described = {
        "feature_extractor": {"feature_extractor_type": "CohereAsrFeatureExtractor"},
        "processor_class": "CohereAsrProcessor",
    }
    Path(folder, "processor_config.json").write_text(json.dumps(described))


if __name__ == "__main__":
    write(sys.argv[1])
