"""A tiny Whisper that says the same in every window: " one two" from 0.00 to 1.00 s, " three four five" from 1.02 to 2.00 s.

Attention writes nothing, so a token alone decides on the next: the decoder's only feed-forward layer has a unit for each
token of the script, which fires for that token's embedding and writes the next one's. Whatever isn't in the script ends
the text. So the text is the same with a prompt, after other text, in every language, and for both tasks. What attention
looks at tells the time of words: each token looks at the frames between two of `BOUNDS`, where the next one is said.

    checkpoint(folder)                       as transformers loads it
    python whisper.py FOLDER '{"source": …}'    the same for CTranslate2; in an environment that has ctranslate2

Needs NumPy and nothing else.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path

import numpy as np

WIDTH, INNER, MELS, FRAMES, POSITIONS = 64, 64, 80, 1500, 448
WORDS = ["Ġone", "Ġtwo", "Ġthree", "Ġfour", "Ġfive"]
EXTENSION_FIELDS = "one two three four five"
BOUNDS = [0.0, 0.5, 1.0, 1.36, 1.7, 2.0, 30.0]
LOOKS = {"<|notimestamps|>": 0, "<|0.00|>": 0, WORDS[0]: 1, WORDS[1]: 2, "<|1.00|>": 2, "<|1.02|>": 2}
LOOKS |= {WORDS[2]: 3, WORDS[3]: 4, WORDS[4]: 5, "<|2.00|>": 5, "<|endoftext|>": 5}
LANGUAGES = [
    "en",
    "zh",
    "de",
    "es",
    "ru",
    "ko",
    "fr",
    "ja",
    "pt",
    "tr",
    "pl",
    "ca",
    "nl",
    "ar",
    "sv",
    "it",
    "id",
    "hi",
    "fi",
    "vi",
    "he",
    "uk",
    "el",
    "ms",
    "cs",
    "ro",
    "da",
    "hu",
    "ta",
    "no",
    "th",
    "ur",
    "hr",
    "bg",
    "lt",
    "la",
    "mi",
    "ml",
    "cy",
    "sk",
    "te",
    "fa",
    "lv",
    "bn",
    "sr",
    "az",
    "sl",
    "kn",
    "et",
    "mk",
    "br",
    "eu",
    "is",
    "hy",
    "ne",
    "mn",
    "bs",
    "kk",
    "sq",
    "sw",
    "gl",
    "mr",
    "pa",
    "si",
    "km",
    "sn",
    "yo",
    "so",
    "af",
    "oc",
    "ka",
    "be",
    "tg",
    "sd",
    "gu",
    "am",
    "yi",
    "lo",
    "uz",
    "fo",
    "ht",
    "ps",
    "tk",
    "nn",
    "mt",
    "sa",
    "lb",
    "my",
    "bo",
    "tl",
    "mg",
    "as",
    "tt",
    "haw",
    "ln",
    "ha",
    "ba",
    "jw",
    "su",
]


def alphabet() -> list[str]:
    """The letters that stand for the 256 bytes in a byte-level vocabulary."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + number) for number in range(len(others))]


def vocabulary(multilingual: bool) -> tuple[dict[str, int], list[str]]:
    """The tokens of text, and the special ones behind them."""
    # CTranslate2 takes a vocabulary for a multilingual one by the empty token in it.
    texts = [*alphabet(), *WORDS, *([""] if multilingual else []), "<|endoftext|>"]
    special = ["<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>", "<|transcribe|>"]
    special += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    special += [f"<|{step * 0.02:.2f}|>" for step in range(1501)]
    return {token: number for number, token in enumerate(texts)}, special


def weights(ids: dict[str, int], *, multilingual: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors, named as transformers names them."""
    random = np.random.default_rng(seed)

    def some(*shape: int) -> np.ndarray:
        return random.normal(0.0, 0.02, shape).astype(np.float32)

    embeddings = random.normal(0.0, 1.0, (len(ids), WIDTH))
    embeddings -= embeddings.mean(axis=1, keepdims=True)  # as the layer norm leaves them
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    end = embeddings[ids["<|endoftext|>"]]
    script = [("<|startoftranscript|>", "<|en|>" if multilingual else "<|0.00|>"), ("<|en|>", "<|transcribe|>")]
    script += [(task, "<|0.00|>") for task in ("<|transcribe|>", "<|translate|>")]
    script += [("<|notimestamps|>", WORDS[0])]
    said = ["<|0.00|>", *WORDS[:2], "<|1.00|>", "<|1.02|>", *WORDS[2:], "<|2.00|>", "<|endoftext|>"]
    script += list(itertools.pairwise(said))
    spell_in, bias_in = np.zeros((INNER, WIDTH)), np.full(INNER, -10.0)
    spell_out = np.zeros((WIDTH, INNER))
    for unit, (token, following) in enumerate(script):
        # The norm makes the embedding 8 long: 8 * 8 - 51 = 13 for this token, below -10 for any other.
        spell_in[unit], bias_in[unit] = 8 * embeddings[ids[token]], -51.0
        spell_out[:, unit] = embeddings[ids[following]]
    positions, look, show = np.zeros((FRAMES, WIDTH)), np.zeros((WIDTH, WIDTH)), np.zeros((WIDTH, WIDTH))
    for number in range(len(BOUNDS) - 1):
        positions[round(BOUNDS[number] * 50) : round(BOUNDS[number + 1] * 50), number] = 5.0
        show[number, number] = 1.0
    for token, number in LOOKS.items():
        look[number] += embeddings[ids[token]]
    tensors: dict[str, np.ndarray] = {
        "model.encoder.conv1.weight": some(WIDTH, MELS, 3),
        "model.encoder.conv1.bias": some(WIDTH),
        "model.encoder.conv2.weight": some(WIDTH, WIDTH, 3),
        "model.encoder.conv2.bias": some(WIDTH),
        "model.encoder.embed_positions.weight": positions,
        "model.decoder.embed_tokens.weight": embeddings,
        "model.decoder.embed_positions.weight": np.zeros((POSITIONS, WIDTH)),
    }

    def norm(name: str, scale: float = 1.0) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = np.full(WIDTH, scale), np.zeros(WIDTH)

    def attention(name: str) -> None:
        norm(f"{name}_layer_norm")
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            quiet = part == "out_proj"
            tensors[f"{name}.{part}.weight"] = np.zeros((WIDTH, WIDTH)) if quiet else 20 * some(WIDTH, WIDTH)
            if part != "k_proj":
                tensors[f"{name}.{part}.bias"] = np.zeros(WIDTH)

    def feed_forward(name: str, into: np.ndarray, into_bias: np.ndarray, out: np.ndarray, out_bias: np.ndarray) -> None:
        norm(f"{name}.final_layer_norm")
        tensors[f"{name}.fc1.weight"], tensors[f"{name}.fc1.bias"] = into, into_bias
        tensors[f"{name}.fc2.weight"], tensors[f"{name}.fc2.bias"] = out, out_bias

    attention("model.encoder.layers.0.self_attn")
    feed_forward(
        "model.encoder.layers.0", some(INNER, WIDTH), np.zeros(INNER), np.zeros((WIDTH, INNER)), np.zeros(WIDTH)
    )
    norm("model.encoder.layer_norm")
    attention("model.decoder.layers.0.self_attn")
    attention("model.decoder.layers.0.encoder_attn")
    tensors["model.decoder.layers.0.encoder_attn.q_proj.weight"] = look
    tensors["model.decoder.layers.0.encoder_attn.k_proj.weight"] = show
    feed_forward("model.decoder.layers.0", spell_in, bias_in, spell_out, 3 * end)
    norm("model.decoder.layer_norm", 4.0)  # sure enough that the rules for timestamps don't outvote words
    return {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}


def checkpoint(folder: Path, *, multilingual: bool) -> None:
    """The folder."""
    folder.mkdir()
    texts, special = vocabulary(multilingual)
    ids = texts | {token: len(texts) + number for number, token in enumerate(special)}
    sot, eot = ids["<|startoftranscript|>"], ids["<|endoftext|>"]
    common = {"decoder_start_token_id": sot, "bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot}
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": "float32",
        "vocab_size": len(ids),
        "num_mel_bins": MELS,
        "d_model": WIDTH,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": INNER,
        "decoder_ffn_dim": INNER,
        "max_source_positions": FRAMES,
        "max_target_positions": POSITIONS,
        "is_encoder_decoder": True,
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
        **common,
    }
    generation = {
        **common,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "is_multilingual": multilingual,
        "max_length": POSITIONS,
        "max_initial_timestamp_index": 50,
        "return_timestamps": False,
        "alignment_heads": [[0, 0]],
    }
    if multilingual:
        generation["lang_to_id"] = {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES}
        generation["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": MELS,
        "sampling_rate": 16000,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
        "padding_value": 0.0,
        "return_attention_mask": False,
    }
    tokenizer = {
        "tokenizer_class": "WhisperTokenizer",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "add_prefix_space": False,
        "model_max_length": 1024,
    }
    files = {
        "generation_config.json": generation,
        "preprocessor_config.json": extractor,
        "processor_config.json": {"processor_class": "WhisperProcessor"},
        "tokenizer_config.json": tokenizer,
        "tokenizer.json": _tokenizer(texts, special),
        "vocab.json": texts,
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    save(folder / "model.safetensors", weights(ids, multilingual=multilingual))
    (folder / "config.json").write_text(json.dumps(config))


def _tokenizer(texts: dict[str, int], special: list[str]) -> dict[str, object]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [("<|endoftext|>", texts["<|endoftext|>"], True)]
    added += [(token, len(texts) + number, not token[2].isdigit()) for number, token in enumerate(special)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **plain, "special": is_special} for token, number, is_special in added
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<|endoftext|>",
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": texts,
            "merges": [],
        },
    }


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file."""
    head, position = {}, 0
    for name, tensor in tensors.items():
        head[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [position, position + tensor.nbytes]}
        position += tensor.nbytes
    text = json.dumps(head | {"__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def read(path: Path) -> dict[str, np.ndarray]:
    """What `save` wrote."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:start])
    head.pop("__metadata__")
    return {
        name: np.frombuffer(
            data[start + item["data_offsets"][0] : start + item["data_offsets"][1]], np.float32
        ).reshape(item["shape"])
        for name, item in head.items()
    }


def convert(source: Path, target: Path) -> None:
    """Write the checkpoint as CTranslate2 stores Whisper."""
    from ctranslate2.specs import WhisperSpec

    tensors = read(source / "model.safetensors")
    spec = WhisperSpec(1, 2, 1, 2)

    def linear(place, *names: str) -> None:
        place.weight = np.concatenate([tensors[f"{name}.weight"] for name in names])
        biases = [tensors.get(f"{name}.bias", np.zeros(WIDTH, np.float32)) for name in names]
        place.bias = np.concatenate(biases)

    def norm(place, name: str) -> None:
        place.gamma, place.beta = tensors[f"{name}.weight"], tensors[f"{name}.bias"]

    def own_attention(place, name: str) -> None:
        norm(place.layer_norm, f"{name}_layer_norm")
        linear(place.linear[0], *(f"{name}.{part}" for part in ("q_proj", "k_proj", "v_proj")))
        linear(place.linear[1], f"{name}.out_proj")

    def feed_forward(place, name: str) -> None:
        norm(place.layer_norm, f"{name}.final_layer_norm")
        linear(place.linear_0, f"{name}.fc1")
        linear(place.linear_1, f"{name}.fc2")

    encoder, decoder = spec.encoder, spec.decoder
    for number, place in ((1, encoder.conv1), (2, encoder.conv2)):
        linear(place, f"model.encoder.conv{number}")
    encoder.position_encodings.encodings = tensors["model.encoder.embed_positions.weight"]
    norm(encoder.layer_norm, "model.encoder.layer_norm")
    own_attention(encoder.layer[0].self_attention, "model.encoder.layers.0.self_attn")
    feed_forward(encoder.layer[0].ffn, "model.encoder.layers.0")
    decoder.scale_embeddings = False
    decoder.embeddings.weight = decoder.projection.weight = tensors["model.decoder.embed_tokens.weight"]
    decoder.position_encodings.encodings = tensors["model.decoder.embed_positions.weight"]
    norm(decoder.layer_norm, "model.decoder.layer_norm")
    layer = decoder.layer[0]
    own_attention(layer.self_attention, "model.decoder.layers.0.self_attn")
    cross = "model.decoder.layers.0.encoder_attn"
    norm(layer.attention.layer_norm, f"{cross}_layer_norm")
    linear(layer.attention.linear[0], f"{cross}.q_proj")
    linear(layer.attention.linear[1], f"{cross}.k_proj", f"{cross}.v_proj")
    linear(layer.attention.linear[2], f"{cross}.out_proj")
    feed_forward(layer.ffn, "model.decoder.layers.0")

    texts = json.loads((source / "vocab.json").read_text(encoding="utf-8"))
    added = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    ids = texts | {token["content"]: token["id"] for token in added}
    spec.register_vocabulary(sorted(ids, key=ids.__getitem__))
    spec.config.suppress_ids, spec.config.suppress_ids_begin = [], []
    spec.config.alignment_heads = [[0, 0]]
    spec.config.lang_ids = [ids[f"<|{code}|>"] for code in LANGUAGES]
    spec.validate()
    target.mkdir()
    for name in ("tokenizer.json", "preprocessor_config.json"):
        shutil.copyfile(source / name, target / name)
    spec.save(str(target))


if __name__ == "__main__":
    convert(Path(json.loads(sys.argv[2])["source"]), Path(sys.argv[1]))
