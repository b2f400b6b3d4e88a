"""Loads a model folder as CTranslate2's converters write it, with the tokenizer's files copied beside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import ctranslate2

from runtimes.ctranslate2.worker import tokenizer
from runtimes.ctranslate2.worker.languages import Languages
from runtimes.ctranslate2.worker.tokenizer import JsonTokenizer, Tokenizer
from runtimes.sdk.chat.language import Format, defaults_of, format_of, markers_of

_VOCABULARIES: Final = {
    "source": ("source_vocabulary", "shared_vocabulary", "vocabulary"),
    "target": ("target_vocabulary", "shared_vocabulary", "vocabulary"),
}
_DEFAULTS: Final = ("temperature", "top_p", "top_k", "repetition_penalty")  # the library has no min_p
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Options:
    """The worker's options (adapter.py). `kind`: a language model generates, a translation model has an encoder, too."""

    path: str
    kind: Literal["generator", "translator"]
    device: Literal["cpu", "cuda"]
    compute_type: str
    threads: int | None
    n_ctx: int
    beam_size: int
    chat_template: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model: a `Language`. Token ids are indices into its vocabularies; prompts use the source vocabulary."""

    engine: Any
    tokenizer: Tokenizer
    source: Sequence[str]
    target: Sequence[str]
    template: str
    special: Mapping[str, str]  # by the names that templates know
    languages: Languages
    after: tuple[str, ...]  # tokens at the end of a source, unless CTranslate2 adds them
    ends: frozenset[int]
    hidden: frozenset[int]
    defaults: Mapping[str, float]
    format: Format
    ids: Mapping[str, int] = field(repr=False)  # of the source
    unknown: int = 0
    knows_tools: bool = False  # a tool's result would be a second turn
    takes_images: bool = False

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return len(self.source)

    def token_ids(self, tokens: Sequence[str]) -> list[int]:
        """The ids of a prompt's tokens."""
        return [self.ids.get(token, self.unknown) for token in tokens]

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        """The tokens of a prompt's ids."""
        return [self.source[token] for token in tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens, special tokens included."""
        return self.tokenizer.decode([self.target[token] for token in tokens])

    def encode_prompt(self, text: str) -> list[int]:
        """A text's tokens, with the special tokens that the tokenizer adds."""
        return self.token_ids(self.tokenizer.encode_prompt(text))


def load(options: Options, parallel: int) -> Loaded:
    """Load the model. Blocks. Raises whatever CTranslate2 raises, and SystemExit for an incomplete folder."""
    folder = Path(options.path)
    described = _load_json(folder / "config.json")
    translates = options.kind == "translator"
    engine_of = ctranslate2.Translator if translates else ctranslate2.Generator
    engine = engine_of(
        options.path,
        device=options.device,
        compute_type=options.compute_type,
        inter_threads=parallel,
        intra_threads=options.threads or 0,
    )
    end = str(described.get("eos_token") or "</s>")
    after = (end,) if translates and not described.get("add_source_eos") else ()
    begin = () if translates or not described.get("bos_token") else (str(described["bos_token"]),)
    read = tokenizer.load(folder, begin, after)
    source, target = (_load_vocabulary(folder, side) for side in ("source", "target"))
    ids = {token: number for number, token in reversed([*enumerate(source)])}
    targets = {token: number for number, token in reversed([*enumerate(target)])}
    form = "none" if translates else format_of(options.chat_template)
    languages = Languages(source if translates else ())
    generation = _load_json(folder / "generation_config.json")
    ends = {end, *_end_tokens(generation, read)}
    hidden = (read.special | languages.tokens) - markers_of(form)
    greedy = translates and not generation.get("do_sample")
    return Loaded(
        engine=engine,
        tokenizer=read,
        source=source,
        target=target,
        template=options.chat_template if isinstance(read, JsonTokenizer) else "",
        special=_special_tokens(folder),
        languages=languages,
        after=after,
        ends=frozenset(targets[token] for token in ends if token in targets),
        hidden=frozenset(targets[token] for token in hidden if token in targets),
        defaults={"temperature": 0.0} if greedy else defaults_of(generation, _DEFAULTS),
        format=form,
        ids=ids,
        unknown=ids.get(str(described.get("unk_token") or "<unk>"), 0),
    )


def _end_tokens(generation: Mapping[str, Any], read: Tokenizer) -> list[str]:
    """The tokens that end an answer, according to generation_config.json, which has the tokenizer's ids."""
    ids = generation.get("eos_token_id")
    numbers = ids if isinstance(ids, list) else [ids]
    if not isinstance(read, JsonTokenizer):
        return []
    return [name for number in numbers if isinstance(number, int) and (name := read.name(number)) is not None]


def _load_vocabulary(folder: Path, side: str) -> list[str]:
    """The vocabulary of one side, source or target: JSON or, in older folders, one token a line."""
    for name in _VOCABULARIES[side]:
        if (folder / f"{name}.json").is_file():
            return [str(token) for token in json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))]
        if (folder / f"{name}.txt").is_file():
            return (folder / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
    raise SystemExit(f"{folder} has no vocabulary: {', '.join(f'{name}.json' for name in _VOCABULARIES[side])}")


def _special_tokens(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _load_json(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key in _SPECIAL and isinstance(text, str):
                found[key] = text
    return found


def _load_json(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found if isinstance(found, dict) else {}
