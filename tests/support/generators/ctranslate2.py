"""Tiny models of CTranslate2. Run by a runtime's Python: `ctranslate2.py FOLDER '{"kind": …}' [LIBRARIES]`.

`language`: a language model of transformers, converted by CTranslate2's own converter; its Python has torch, and CTranslate2 is
in LIBRARIES. `languages`: a translation model with tokens for languages and a tokenizer.json, as NLLB. `pair`: one for a single
pair, with SentencePiece models, as Opus-MT. Translations say their script, whatever the source: all layers add nothing, and
the output row of each token answers to the embedding of the one before it.
"""

from __future__ import annotations

import io
import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np

WIDTH, INNER, HEADS = 64, 128, 4
END, START = "</s>", "<s>"
SCRIPTS = {
    "deu_Latn": ["▁Hallo", "▁von", "▁einem", "▁kleinen", "▁Modell", END],
    "fra_Latn": ["▁Bonjour", "▁d", "'un", "▁petit", "▁modèle", END],
}
SOURCE = ["Hello", "from", "a", "tiny", "model,", "hello", "from", "all", "of", "us", "here."]


def translation(folder: Path, tokens: list[str], chains: list[list[str]]) -> None:
    """The model, its vocabulary and its description."""
    from ctranslate2.specs import TransformerSpec, common_spec

    random = np.random.default_rng(0)
    spec = TransformerSpec.from_config((1, 1), HEADS, activation=common_spec.Activation.RELU)
    table = random.standard_normal((len(tokens), WIDTH)).astype(np.float32)

    def norm(place) -> None:
        place.gamma, place.beta = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)

    def linear(place, rows: int, columns: int, *, silent: bool = False) -> None:
        weight = random.standard_normal((rows, columns)).astype(np.float32)
        place.weight = np.zeros_like(weight) if silent else weight
        place.bias = np.zeros(rows, np.float32)

    def layer(place) -> None:
        norm(place.self_attention.layer_norm)
        linear(place.self_attention.linear[0], 3 * WIDTH, WIDTH)
        linear(place.self_attention.linear[1], WIDTH, WIDTH, silent=True)
        norm(place.ffn.layer_norm)
        linear(place.ffn.linear_0, INNER, WIDTH)
        linear(place.ffn.linear_1, WIDTH, INNER, silent=True)

    encoder, decoder = spec.encoder, spec.decoder
    layer(encoder.layer[0])
    norm(encoder.layer_norm)
    encoder.embeddings[0].weight = table
    encoder.position_encodings.encodings = np.zeros((512, WIDTH), np.float32)
    layer(decoder.layer[0])
    cross = decoder.layer[0].attention
    norm(cross.layer_norm)
    linear(cross.linear[0], WIDTH, WIDTH)
    linear(cross.linear[1], 2 * WIDTH, WIDTH)
    linear(cross.linear[2], WIDTH, WIDTH, silent=True)
    norm(decoder.layer_norm)
    decoder.scale_embeddings = False
    decoder.embeddings.weight = table
    decoder.position_encodings.encodings = np.zeros((512, WIDTH), np.float32)
    places = {token: number for number, token in enumerate(tokens)}
    output = np.zeros_like(table)
    for chain in chains:
        for left, right in pairwise(chain):
            row = table[places[left]]
            output[places[right]] += row / np.linalg.norm(row)
    decoder.projection.weight, decoder.projection.bias = output, np.zeros(len(tokens), np.float32)
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.decoder_start_token = END
    spec.validate()
    folder.mkdir(parents=True)
    spec.save(str(folder))


def languages(folder: Path) -> None:
    """For two languages, which are told."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = sorted({word for chain in SCRIPTS.values() for word in chain[:-1]} | {f"▁{word}" for word in SOURCE})
    tokens = [START, "<pad>", END, "<unk>", *words, *SCRIPTS, "eng_Latn"]
    translation(folder, tokens, [[code, *chain] for code, chain in SCRIPTS.items()])
    made = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens([START, "<pad>", END, "<unk>", *SCRIPTS, "eng_Latn"])
    made.post_processor = processors.TemplateProcessing(
        single=f"eng_Latn $A {END}", special_tokens=[("eng_Latn", tokens.index("eng_Latn")), (END, 2)]
    )
    made.save(str(folder / "tokenizer.json"))


def pair(folder: Path) -> None:
    """From one language into one other."""
    import sentencepiece

    def trained(texts: list[str]) -> bytes:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts * 20),
            model_writer=model,
            vocab_size=60,
            hard_vocab_limit=False,
            pad_id=-1,
            minloglevel=2,
        )
        return model.getvalue()

    answer = "Hallo von einem kleinen Modell"
    files = {"source.spm": trained([" ".join(SOURCE)]), "target.spm": trained([answer])}
    readers = {name: sentencepiece.SentencePieceProcessor(model_proto=made) for name, made in files.items()}
    tokens = [END, "<unk>", "<pad>"]
    for reader in readers.values():
        pieces = map(reader.id_to_piece, range(reader.get_piece_size()))
        tokens += [piece for piece in pieces if piece not in tokens]
    chain = [END, *readers["target.spm"].encode(answer, out_type=str)]
    once = [word for at, word in enumerate(chain) if word not in chain[:at]]  # each has one follower
    translation(folder, tokens, [[*once, "<pad>"]])
    for name, made in files.items():
        (folder / name).write_bytes(made)


def language(folder: Path, source: str) -> None:
    """A converted folder of transformers."""
    from ctranslate2.converters import TransformersConverter

    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
    TransformersConverter(source, copy_files=names).convert(str(folder))


if __name__ == "__main__":
    sys.path += sys.argv[3:]
    options = json.loads(sys.argv[2])
    {"languages": languages, "pair": pair, "language": language}[options.pop("kind")](Path(sys.argv[1]), **options)
