r"""Scripted models: real llama-architecture GGUF files of a few MiB whose next token is a function of the last one.

All blocks output zero, so the final hidden state is the embedding of the last token. Embeddings are random rows of ±1, nearly
orthogonal to each other, and the output row of token *b* is the embedding of the token *a* that it follows in a script; so
after *a* comes *b*, with all other logits far below. Every engine therefore gives the same text, ends with
`finish_reason: stop`, and streams, thinks, calls tools and fills batches like with any other model. All embeddings agree in
their first value, so the answer follows any token that no script continues, such as the end of a completion's prompt.

The chat template steers by the prompt's last token: `\n` after `assistant` thinks and answers, an empty thought
(`enable_thinking: false`) answers at once, and `<|plan|>`, which the template adds when a request offers the script's tool and
the user spoke last, calls that tool. The template resembles Qwen3's, so that llama.cpp recognises reasoning and tool calls.

The vocabulary has the most frequent parts of English and JSON (merges.txt), so that a long prompt, such as a chat program's
many tools, is some thousands of tokens as with other models, and read in a second.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from supervisor.cli.demo import gguf

TEMPLATE: Final = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
MERGES: Final = (Path(__file__).parent / "merges.txt").read_text(encoding="utf-8").splitlines()
ANSWER: Final = "Hello from a tiny model"
THOUGHT: Final = "pondering"
TOOL_CALL: Final[Mapping[str, object]] = {"name": "get_weather", "arguments": {"city": "Paris"}}

CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|plan|>")
INSERTING: Final = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
MARKS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_NORMAL_TYPE, _CONTROL_TYPE, _USER_DEFINED_TYPE = 1, 3, 4
_SIGNS: Final = bytes.maketrans(b"01", b"\xff\x01")  # as signed bytes: -1 and 1
_NEWLINE, _SPACE = "\u010a", "\u0120"  # how GPT-2 vocabularies spell them


@dataclass(frozen=True, slots=True)
class Tiny:
    """The model to write. `size_mib`: add blocks, which the engine really loads, until the file has about this size."""

    answer: str = ANSWER
    thought: str = THOUGHT
    tool_call: Mapping[str, object] = field(default_factory=lambda: TOOL_CALL)
    name: str = "tiny"
    context: int = 32768
    dim: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head: int = 64  # values per attention head; the time of a long prompt is proportional
    feed_forward: int = 128
    seed: int = 0
    inserts: bool = False  # whether it has tokens for fill-in-the-middle
    size_mib: int = 0


def write(path: Path, tiny: Tiny = Tiny()) -> None:
    """Write the model; about 50 ms, whatever its size. Raises OSError."""
    tokens, types, merges, chains = _vocabulary(tiny)
    layers, inner = _dimensions(tiny, len(tokens))
    keys: dict[str, gguf.Scalar | Sequence[gguf.Scalar]] = {
        "general.architecture": "llama",
        "general.name": tiny.name,
        "general.file_type": 0,
        "llama.context_length": tiny.context,
        "llama.embedding_length": tiny.dim,
        "llama.block_count": layers,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": tiny.heads,
        "llama.attention.head_count_kv": tiny.kv_heads,
        "llama.attention.key_length": tiny.head,
        "llama.attention.value_length": tiny.head,
        "llama.rope.dimension_count": tiny.head,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE.replace("@tool@", str(tiny.tool_call["name"])),
    }
    follows = _predecessors(tokens, chains)
    tensors = _tensors(tiny, layers, inner, _embedding(tiny, len(tokens)), follows, tokens.index(chains[1][1]))
    gguf.write(path, keys, tensors)


def _byte_alphabet() -> list[str]:
    """A printable character for each of the 256 bytes: the first tokens of every GPT-2 vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def _byte_level_text(text: str) -> str:
    alphabet = _byte_alphabet()
    return "".join(alphabet[byte] for byte in text.encode())


def _word_tokens(text: str) -> list[str]:
    """One token for each word, the blank before it included."""
    return [_byte_level_text(word if i == 0 else " " + word) for i, word in enumerate(text.split())]


def _vocabulary(tiny: Tiny) -> tuple[list[str], list[int], list[str], list[list[str]]]:
    """Tokens, their types, their merges, and the scripts as chains of tokens."""
    call = _byte_level_text("\n" + json.dumps(tiny.tool_call) + "\n")
    # a token determines the next one, so no token may occur twice in the scripts
    answer = [_NEWLINE * 2, *_word_tokens(tiny.answer), "<|im_end|>"]
    think = [_NEWLINE, "<think>", *_word_tokens(tiny.thought), "</think>", _NEWLINE * 2]
    chains = [think, answer, ["<|plan|>", "<tool_call>", call, "</tool_call>", "<|im_end|>"]]
    tokens = dict.fromkeys(_byte_alphabet())
    control = (*CONTROL, *(INSERTING if tiny.inserts else ()))
    special = {*control, *MARKS}
    scripted = {token for chain in chains for token in chain} - special - set(tokens)
    merges = [f"{_NEWLINE} {_NEWLINE}"]
    for merge in MERGES:
        left, right = merge.split(" ")
        if (
            left in tokens and right in tokens and left + right not in scripted
        ):  # else a prompt could contain a scripted token
            merges.append(merge)
            tokens[left + right] = None
    tokens |= dict.fromkeys(sorted(scripted))
    types = [_NORMAL_TYPE] * len(tokens) + [_CONTROL_TYPE] * len(control) + [_USER_DEFINED_TYPE] * len(MARKS)
    return [*tokens, *control, *MARKS], types, merges, chains


def _predecessors(tokens: list[str], chains: list[list[str]]) -> dict[int, list[int]]:
    """For each scripted token, the tokens before it."""
    index = {token: i for i, token in enumerate(tokens)}
    after: dict[int, list[int]] = {}
    successor: dict[str, str] = {}
    for chain in chains:
        for left, right in pairwise(chain):
            assert successor.setdefault(left, right) == right, f"{left} would have two successors"
            after.setdefault(index[right], []).append(index[left])
    return after


def _dimensions(tiny: Tiny, vocabulary: int) -> tuple[int, int]:
    """The number of blocks and their inner width, such that the file has `size_mib`, if that is set."""
    wanted = tiny.size_mib * (1 << 18) - 2 * vocabulary * tiny.dim  # f32 values left for the blocks
    if wanted <= 0:
        return tiny.layers, tiny.feed_forward
    attention = 2 * tiny.dim * tiny.head * (tiny.heads + tiny.kv_heads)
    widest = 16 * tiny.dim
    layers = max(tiny.layers, math.ceil(wanted / (attention + 3 * tiny.dim * widest)))
    inner = max((wanted // layers - attention) // (3 * tiny.dim), 32)
    return layers, inner // 32 * 32


def _embedding(tiny: Tiny, vocabulary: int) -> list[array[float]]:
    source = random.Random(tiny.seed)  # noqa: S311 - a fixture, not a secret
    rows = []
    for _ in range(vocabulary):
        bits = f"{source.getrandbits(tiny.dim):0{tiny.dim}b}".encode().translate(_SIGNS)
        rows.append(array("f", array("b", bits)))
        rows[-1][0] = 1.0
    return rows


def _tensors(
    tiny: Tiny,
    layers: int,
    inner: int,
    embedding: list[array[float]],
    follows: Mapping[int, Sequence[int]],
    answer: int,
) -> dict[str, gguf.Tensor]:
    dim, query, kv = tiny.dim, tiny.head * tiny.heads, tiny.head * tiny.kv_heads
    output = array("f", bytes(4 * dim * len(embedding)))
    for token, predecessors in follows.items():
        rows = zip(*(embedding[before] for before in predecessors), strict=True)
        output[token * dim : (token + 1) * dim] = array("f", [2.0 * sum(column) for column in rows])
    output[answer * dim] += 0.8 * dim  # below a scripted successor's logit, above all random ones
    flat = array("f")
    for row in embedding:
        flat.extend(row)
    tensors = {"token_embd.weight": gguf.Tensor((len(embedding), dim), flat)}
    for i in range(layers):
        tensors |= {
            f"blk.{i}.attn_norm.weight": gguf.ones(dim),
            f"blk.{i}.attn_q.weight": gguf.Tensor((query, dim)),
            f"blk.{i}.attn_k.weight": gguf.Tensor((kv, dim)),
            f"blk.{i}.attn_v.weight": gguf.Tensor((kv, dim)),
            f"blk.{i}.attn_output.weight": gguf.Tensor((dim, query)),
            f"blk.{i}.ffn_norm.weight": gguf.ones(dim),
            f"blk.{i}.ffn_gate.weight": gguf.Tensor((inner, dim)),
            f"blk.{i}.ffn_up.weight": gguf.Tensor((inner, dim)),
            f"blk.{i}.ffn_down.weight": gguf.Tensor((dim, inner)),
        }
    return tensors | {
        "output_norm.weight": gguf.ones(dim),
        "output.weight": gguf.Tensor((len(embedding), dim), output),
    }
