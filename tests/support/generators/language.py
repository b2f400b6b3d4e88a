r"""Writes a tiny language model for transformers: a real checkpoint of a few MiB, with tokenizer and chat template.

All blocks add nothing to the residual stream, so the next token is a function of the last one alone, and the output
rows spell scripts: after `\n` the model thinks, answers and stops. What the prompt ends with decides which script it is,
and the chat templates, shaped like those of the families they stand for, see to that. `random` leaves the weights as they
were drawn: such a model says nothing of sense, but every part of it counts.

Run by the Python of the transformers runtime: `language.py FOLDER '{"kind": "qwen3", …}'`. tests/support/tiny_language.py does.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NEWLINE, SPACE = "\u010a", "\u0120"  # how byte-level vocabularies spell them
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|plan|>", "<|plans|>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
TURNS = ["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"]
END = {"gpt_oss": "<|return|>", "turns": "<turn|>"}
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

TAGGED = r"""
{%- if tools %}{{ '<|im_start|>system\n# Tools\n<tools>' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '\n</tools>\n@form@<|im_end|>\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content or [] %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '\n<tool_call>\n' + call.function.name }}
{%- for key, value in call.function.arguments | items %}{{ '\n' + key + ': ' + (value | string) }}{% endfor %}{{ '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- set calls = tools and messages[-1].role == 'user' and 'steps' not in (messages[-1].content | string) %}
{%- if messages | length > 1 and messages[-2].role == 'tool' %}{% set calls = false %}{% endif %}
{%- if (enable_thinking is defined and enable_thinking is false) or (calls and '@open@') %}{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '@open@' }}{% endif %}
{%- if calls %}{{ '<|plans|>' if tools | length > 1 else '<|plan|>' }}{% endif %}{% endif %}"""


HARMONIC = r"""
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|start|>assistant<|channel|>commentary to=functions.' + message.tool_calls[0].function.name + '<|message|>' }}
{{- (message.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
{%- else %}{{ '<|start|>' + message.role }}
{%- if message.role == 'assistant' %}{{ '<|channel|>final' }}{% endif %}{{ '<|message|>' + (message.content or '') + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}
{%- if tools and messages[-1].role == 'user' and 'steps' not in messages[-1].content %}{{ '<|plan|>' }}{% endif %}{% endif %}"""

TURNED = r"""
{%- if tools %}{{ '<|turn>system\n' + (tools | tojson) + '<turn|>\n' }}{% endif %}
{%- for message in messages %}{{ '<|turn>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ '<|tool_call>call:' + call.function.name + (call.function.arguments | tojson) + '<tool_call|>' }}{% endfor %}
{{- '<turn|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\n' }}
{%- if tools and messages[-1].role == 'user' and 'steps' not in messages[-1].content %}
{{- '<|plans|>' if tools | length > 1 else '<|plan|>' }}{% endif %}{% endif %}"""

RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|turn>model\n",
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"\s*<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<turn|>"},
    },
}
"""What the checkpoint of kind `turns` says of its answers."""

JSON_FORM = r'<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
XML_FORM = r"<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"


def spelt(text: str) -> str:
    """A text as a byte-level vocabulary writes it."""
    return "".join(
        part for part, _ in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    )


def scripts(kind: str, *, endless: bool, tool_call: dict | None = None) -> list[list[str]]:
    """Chains of tokens, each following the one before it wherever it stands."""
    smile = [spelt("🙂")[i] for i in range(4)]  # one token a byte
    words = [spelt(word) for word in ("Hello", " from", " a", " tiny", " model")]
    end = END.get(kind, "<|im_end|>")
    answer = [*words, *([spelt(" and"), words[2]] if endless else [SPACE, *smile, end])]
    thought = [spelt("pond"), spelt("ering")]
    if kind == "gpt_oss":
        arguments = [spelt('{"city":'), spelt(' "Paris"}'), "<|call|>"]
        analysis = spelt("<|channel|>analysis<|message|>")
        final = spelt("<|start|>assistant<|channel|>final<|message|>")
        header = spelt("<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>")
        return [
            ["assistant", analysis, *thought, "<|end|>", final, *answer],
            ["<|plan|>", header, *arguments],
            ["<|channel|>", "commentary"],
            ["<|message|>", *arguments],
        ]
    if kind == "turns":
        call = [spelt("call:get_weather"), spelt('{city: "Par'), spelt('is"}'), "<tool_call|>", end]
        both = [
            spelt('<|tool_call>call:get_weather{"city": "Paris"}<tool_call|>\n<|tool_call>call:get_time{}<tool_call|>')
        ]
        return [
            [NEWLINE, "<|channel>", spelt("thought\n"), *thought, "<channel|>", NEWLINE * 2, *answer],
            ["<|plan|>", "<|tool_call>", *call],
            ["<|plans|>", *both, end],
        ]
    after = ["</think>", NEWLINE * 2, *answer]
    if tool_call is not None:
        call = ["<tool_call>", spelt(f"\n{json.dumps(tool_call)}\n"), "</tool_call>", end]
        return [[NEWLINE, "<think>", *thought, *after], ["<|plan|>", *call], ["<|plans|>", *call]]
    if kind == "qwen3":
        arguments = [spelt(' {"city":'), spelt(' "Paris"}'), spelt("}\n"), "</tool_call>", end]
        call = ["<tool_call>", spelt('\n{"name":'), spelt(' "get_weather",'), spelt(' "arguments":'), *arguments]
        both = [spelt('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n')]
        both += [spelt('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'), end]
        return [[NEWLINE, "<think>", *thought, *after], ["<|plan|>", *call], ["<|plans|>", *both], [":", *arguments]]
    arguments = [spelt("\n<parameter=city>"), spelt("\nParis"), spelt("\n</parameter>"), spelt("\n</function>\n")]
    arguments += ["</tool_call>", end]
    call = ["<tool_call>", spelt("\n<function=get_weather>"), *arguments]
    both = [
        spelt("<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n")
    ]
    both += [spelt("<tool_call>\n<function=get_time>\n</function>\n</tool_call>"), end]
    return [
        [NEWLINE, *thought, *after],
        ["<|plan|>", *call],
        ["<|plans|>", *both],
        [">", *arguments],
    ]


def tokenizer(kind: str, chains: list[list[str]], merges: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE: the 256 bytes, what is merged of them, the scripts' words, and the special tokens."""
    special = [*SPECIAL, *VISION, *HARMONY, *(TURNS if kind == "turns" else [])]
    added = [*MARKS, "assistant", "commentary"] if kind == "gpt_oss" else MARKS
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    scripted = {NEWLINE * 2, *(token for chain in chains for token in chain)} - set(special) - set(added) - set(words)
    words += sorted(scripted)
    pairs, known = [(NEWLINE, NEWLINE)], dict.fromkeys(words)
    for left, right in (merge.split(" ") for merge in merges):
        if {left, right} <= known.keys() and left + right not in scripted:  # a prompt has no scripted token
            pairs.append((left, right))
            known[left + right] = None
    model = models.BPE(vocab={word: i for i, word in enumerate(known)}, merges=pairs)
    tokens = Tokenizer(model)
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(special)
    tokens.add_tokens([AddedToken(word, normalized=False) for word in added])
    end = END.get(kind, "<|im_end|>")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=end, pad_token="<|endoftext|>")
    if kind == "gpt_oss":
        fast.chat_template = HARMONIC
    elif kind == "turns":
        fast.chat_template, fast.response_template = TURNED, RESPONSES
    else:
        form, opened = (JSON_FORM, "") if kind == "qwen3" else (XML_FORM, r"<think>\n")
        fast.chat_template = TAGGED.replace("@form@", form).replace("@open@", opened)
    return fast


def build(kind: str, fast: transformers.PreTrainedTokenizerFast, sizes: dict) -> transformers.PreTrainedModel:
    """The model with random weights."""
    ids = fast.convert_tokens_to_ids
    base = {
        "vocab_size": len(fast),
        "hidden_size": 256,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "eos_token_id": fast.eos_token_id,
        "pad_token_id": fast.pad_token_id,
        "bos_token_id": None,
        **sizes,
    }
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "layer_types": ["linear_attention", "full_attention"],
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": base["hidden_size"],
        "num_position_embeddings": 64,
    }
    tokens = {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
        "tie_word_embeddings": False,
    }
    match kind:
        case "qwen3" | "turns":
            return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**base))
        case "gpt_oss":
            config = transformers.GptOssConfig(**base, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
            return transformers.GptOssForCausalLM(config)
        case "qwen3_5":
            return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**base, **linear))
        case "qwen3_5_vision":
            config = transformers.Qwen3_5Config(text_config={**base, **linear}, vision_config=vision, **tokens)
            return transformers.Qwen3_5ForConditionalGeneration(config)
        case "qwen3_vl":
            rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10]}
            config = transformers.Qwen3VLConfig(
                text_config={**base, "rope_parameters": rope},
                vision_config={**vision, "deepstack_visual_indexes": [0]},
                **tokens,
            )
            return transformers.Qwen3VLForConditionalGeneration(config)
        case _:
            raise SystemExit(f"there is no kind {kind}")


def spell(
    model: transformers.PreTrainedModel, fast: transformers.PreTrainedTokenizerFast, chains: list[list[str]]
) -> None:
    """Blocks add nothing; the output row of b answers to the embedding of a, for each pair a, b of a script."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    follower: dict[str, str] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                parameter.zero_()
        embedding.normal_(0, 1)
        head.zero_()
        for chain in chains:
            for left, right in pairwise(chain):
                if follower.setdefault(left, right) != right:
                    raise SystemExit(f"{left} would have two followers")
        for left, right in follower.items():
            row = embedding[fast.convert_tokens_to_ids(left)]
            head[fast.convert_tokens_to_ids(right)] += 2 * row / row.pow(2).mean().sqrt()


def quantise(folder: Path, method: str) -> None:
    """The blocks' weights as published checkpoints store them: FP8 with a scale for each tile, or experts in MXFP4."""
    file = folder / "model.safetensors"
    out: dict[str, torch.Tensor] = {}
    for name, value in load_file(file).items():
        if method == "fp8" and "layers" in name and value.ndim == 2:
            rows, columns = (-(-size // 128) for size in value.shape)
            out[name] = value.clamp(-448, 448).to(torch.float8_e4m3fn)
            out[f"{name}_scale_inv"] = torch.ones(rows, columns)
        elif method == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            experts, taken, given = value.shape
            nibbles = torch.randint(0, 256, (experts, given, taken // 32, 16), dtype=torch.uint8)
            out[f"{name}_blocks"] = nibbles if value.any() else torch.zeros_like(nibbles)
            out[f"{name}_scales"] = torch.full((experts, given, taken // 32), 120, dtype=torch.uint8)  # 2 ** -7
        else:
            out[name] = value
    save_file(out, file, {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": method, "modules_to_not_convert": ["lm_head"]}
    if method == "fp8":
        described["quantization_config"] |= {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(described))


def write(
    folder: Path,
    kind: str = "qwen3",
    *,
    endless: bool = False,
    random: bool = False,
    seed: int = 0,
    dtype: str = "float32",
    quantised: str | None = None,
    tool_call: dict | None = None,
    merges: list[str] = [],  # of JSON
    **sizes: int,
) -> None:
    """The whole model folder. `tool_call` is what it calls instead of `get_weather`; of kind `qwen3`."""
    torch.manual_seed(seed)
    chains = scripts(kind, endless=endless, tool_call=tool_call)
    fast = tokenizer(kind, chains, merges)
    model = build(kind, fast, sizes)
    if random:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.1)
    else:
        spell(model, fast, chains)
    ends = ["<|return|>", "<|call|>"] if kind == "gpt_oss" else [END.get(kind, "<|im_end|>"), "<|endoftext|>"]
    model.generation_config.eos_token_id = [fast.convert_tokens_to_ids(end) for end in ends]
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    fast.save_pretrained(folder)
    if quantised is not None:
        quantise(folder, quantised)
    if kind in {"qwen3_vl", "qwen3_5_vision"}:
        pictures = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
        }
        pictures |= {"size": {"shortest_edge": 1024, "longest_edge": 65536}, "processor_class": "Qwen3VLProcessor"}
        (folder / "preprocessor_config.json").write_text(json.dumps(pictures))


if __name__ == "__main__":
    write(Path(sys.argv[1]), **json.loads(sys.argv[2]))
