"""A tiny reranker: `cross_encoder.py FOLDER '{"tokenizer": "FOLDER", "labels": 1}'`, in the environment of embeddings.

Random but sharp: scores differ from pair to pair, so a mixed-up order shows. With more labels it is a classifier.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification


def write(folder: str, tokenizer: str, labels: int) -> None:
    torch.manual_seed(0)
    reader = AutoTokenizer.from_pretrained(tokenizer)
    config = BertConfig(
        vocab_size=len(reader),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        num_labels=labels,
    )
    model = BertForSequenceClassification(config)
    model.classifier.weight.data.normal_(0, 3)
    reader.model_max_length = 128
    model.save_pretrained(folder)
    reader.save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1], **json.loads(sys.argv[2]))
