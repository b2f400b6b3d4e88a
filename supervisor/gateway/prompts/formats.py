"""Conversations as the prompts that models were trained with: exactly the output of their own chat templates.

No prompt begins with the token that begins a text (`<s>`, `<bos>`): workers put that before every text that they complete.
Templates trim some texts. A very large text, whose middle is missing here, keeps its end untrimmed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from runtimes.model_config import PromptFormatName
from supervisor.errors import InvalidRequestError
from supervisor.gateway.prompts.conversation import Turn, system_of


@dataclass(frozen=True, slots=True)
class PromptInput:
    """A conversation that needs a prompt. `thinks`: the model should think first; `model`: its name, for errors."""

    turns: Sequence[Turn]
    thinks: bool
    model: str


Writer = Callable[[PromptInput], str]

_ALPACA: Final = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)
_UNKNOWN: Final = frozenset({"", "auto", "mixed"})  # source languages that the model must detect
_SOURCES: Final = ("en", "de")  # used for an unknown source: the first that isn't the target
_LANGUAGE_LIST: Final = """
aa Afar, ab Abkhazian, af Afrikaans, ak Akan, am Amharic, an Aragonese, ar Arabic, as Assamese, az Azerbaijani, ba Bashkir,
be Belarusian, bg Bulgarian, bm Bambara, bn Bengali, bo Tibetan, br Breton, bs Bosnian, ca Catalan, ce Chechen, co Corsican,
cs Czech, cv Chuvash, cy Welsh, da Danish, de German, dv Divehi, dz Dzongkha, ee Ewe, el Greek, en English, eo Esperanto,
es Spanish, et Estonian, eu Basque, fa Persian, ff Fulah, fi Finnish, fil Filipino, fo Faroese, fr French,
fy Western Frisian, ga Irish, gd Scottish Gaelic, gl Galician, gn Guarani, gu Gujarati, gv Manx, ha Hausa, he Hebrew,
hi Hindi, hr Croatian, ht Haitian, hu Hungarian, hy Armenian, ia Interlingua, id Indonesian, ie Interlingue, ig Igbo,
ii Sichuan Yi, ik Inupiaq, io Ido, is Icelandic, it Italian, iu Inuktitut, ja Japanese, jv Javanese, ka Georgian, ki Kikuyu,
kk Kazakh, kl Kalaallisut, km Central Khmer, kn Kannada, ko Korean, ks Kashmiri, ku Kurdish, kw Cornish, ky Kyrgyz, la Latin,
lb Luxembourgish, lg Ganda, ln Lingala, lo Lao, lt Lithuanian, lu Luba-Katanga, lv Latvian, mg Malagasy, mi Maori,
mk Macedonian, ml Malayalam, mn Mongolian, mr Marathi, ms Malay, mt Maltese, my Burmese, nb Norwegian Bokmål,
nd North Ndebele, ne Nepali, nl Dutch, nn Norwegian Nynorsk, no Norwegian, nr South Ndebele, nv Navajo, ny Chichewa,
oc Occitan, om Oromo, or Oriya, os Ossetian, pa Punjabi, pl Polish, ps Pashto, pt Portuguese, qu Quechua, rm Romansh,
rn Rundi, ro Romanian, ru Russian, rw Kinyarwanda, sa Sanskrit, sc Sardinian, sd Sindhi, se Northern Sami, sg Sango,
si Sinhala, sk Slovak, sl Slovenian, sn Shona, so Somali, sq Albanian, sr Serbian, ss Swati, st Southern Sotho, su Sundanese,
sv Swedish, sw Swahili, ta Tamil, te Telugu, tg Tajik, th Thai, ti Tigrinya, tk Turkmen, tl Tagalog, tn Tswana, to Tonga,
tr Turkish, ts Tsonga, tt Tatar, ug Uyghur, uk Ukrainian, ur Urdu, uz Uzbek, ve Venda, vi Vietnamese, vo Volapük, wa Walloon,
wo Wolof, xh Xhosa, yi Yiddish, yo Yoruba, za Zhuang, zh Chinese, zu Zulu
"""
LANGUAGES: Final = MappingProxyType(dict(item.strip().split(" ", 1) for item in _LANGUAGE_LIST.split(",")))
"""The first part of a language's code → its English name, as in TranslateGemma's chat template. `pt-BR` is Portuguese."""


def _generic_prompt(prompt_input: PromptInput) -> str:
    system = system_of(prompt_input.turns)
    labels = {"user": "User", "assistant": "Assistant"}
    lines = "".join(f"{labels[turn.role]}: {turn.text}\n" for turn in prompt_input.turns if turn.role != "system")
    return f"{system}\n\n{lines}Assistant:" if system else f"{lines}Assistant:"


def _mistral_prompt(prompt_input: PromptInput) -> str:
    """The system messages come before the user's first message, in the same turn."""
    system, prompt = system_of(prompt_input.turns), ""
    for turn in prompt_input.turns:
        if turn.role == "user":
            before = f"{system}\n\n" if system else ""
            prompt, system = f"{prompt}[INST] {before}{turn.text} [/INST]", ""
        elif turn.role == "assistant":
            prompt += f" {turn.text.strip()}</s>"
    return prompt


def _chatml_prompt(prompt_input: PromptInput) -> str:
    return (
        "".join(f"<|im_start|>{turn.role}\n{turn.text}<|im_end|>\n" for turn in prompt_input.turns)
        + "<|im_start|>assistant\n"
    )


def _qwen3_prompt(prompt_input: PromptInput) -> str:
    """ChatML without the thoughts of earlier answers. Without thinking, the answer begins after an empty thought."""
    turns = [
        Turn(turn.role, turn.text.rpartition("</think>")[2].lstrip("\n")) if turn.role == "assistant" else turn
        for turn in prompt_input.turns
    ]
    return _chatml_prompt(replace(prompt_input, turns=turns)) + (
        "" if prompt_input.thinks else "<think>\n\n</think>\n\n"
    )


def _gemma4_prompt(prompt_input: PromptInput) -> str:
    prompt = ""
    if prompt_input.thinks and prompt_input.turns[0].role != "system":
        prompt = "<|turn>system\n<|think|>\n<turn|>\n"
    for index, turn in enumerate(prompt_input.turns):
        role = "model" if turn.role == "assistant" else turn.role
        text = _without_thoughts(turn.text) if role == "model" else turn.text
        switch = "<|think|>\n" if prompt_input.thinks and index == 0 and role == "system" else ""
        prompt += f"<|turn>{role}\n{switch}{text.strip()}<turn|>\n"
    return prompt + "<|turn>model\n" + ("" if prompt_input.thinks else "<|channel>thought\n<channel|>")


def _translategemma_prompt(prompt_input: PromptInput) -> str:
    """One text, from one language into another. If the source is unknown, the prompt asks the model to detect it."""
    turns, name = prompt_input.turns, prompt_input.model
    if [turn.role for turn in turns] != ["user"]:
        what = "leave instructions out" if turns[0].role == "system" else "send one message, of the user"
        raise InvalidRequestError(f"{name} translates one text a request: {what}.", param="messages")
    codes, text = turns[0].languages, turns[0].text.strip()
    if not codes.get("target_lang_code"):
        raise InvalidRequestError(
            f'{name} translates: say into which language with "target_lang_code", such as "en". In a chat it stands in the '
            'one part of the message: {"type": "text", "text": …, "source_lang_code": …, "target_lang_code": …}.',
            param="target_lang_code",
        )
    target, into = _parse_language(codes["target_lang_code"], "target_lang_code")
    language = codes.get("source_lang_code", "")
    if language.lower() in _UNKNOWN:
        text = f"(Detect the language of each segment below, and translate all of them into {into}.)\n\n{text}"
        language = next(code for code in _SOURCES if LANGUAGES[code] != into)
    source, out_of = _parse_language(language, "source_lang_code")
    return (
        f"<start_of_turn>user\nYou are a professional {out_of} ({source}) to {into} ({target}) translator. Your goal is to "
        f"accurately convey the meaning and nuances of the original {out_of} text while adhering to {into} grammar, "
        f"vocabulary, and cultural sensitivities.\nProduce only the {into} translation, without any additional "
        f"explanations or commentary. Please translate the following {out_of} text into {into}:\n\n\n{text}"
        "<end_of_turn>\n<start_of_turn>model\n"
    )


def _alpaca_prompt(prompt_input: PromptInput) -> str:
    prompt = system_of(prompt_input.turns) or _ALPACA
    for turn in prompt_input.turns:
        if turn.role == "user":
            prompt += f"\n\n### Instruction:\n{turn.text}\n\n### Response:\n"
        elif turn.role == "assistant":
            prompt += turn.text.strip()
    return prompt


def _raw_prompt(prompt_input: PromptInput) -> str:
    return "\n\n".join(turn.text for turn in prompt_input.turns)


WRITERS: Final[Mapping[PromptFormatName, Writer]] = {
    "generic": _generic_prompt,
    "mistral_template": _mistral_prompt,
    "qwen3_template": _qwen3_prompt,
    "gemma4_template": _gemma4_prompt,
    "translategemma_template": _translategemma_prompt,
    "chatml": _chatml_prompt,
    "alpaca": _alpaca_prompt,
    "raw": _raw_prompt,
}


def _without_thoughts(text: str) -> str:
    return "".join(part.partition("<|channel>")[0] for part in text.split("<channel|>"))


def _parse_language(code: str, field: str) -> tuple[str, str]:
    """The code in the template's form, and the language's name. Raises InvalidRequestError."""
    written = code.replace("_", "-")
    name = LANGUAGES.get(written.partition("-")[0].lower())
    if name is None or not written.replace("-", "").isalnum() or len(written) > 20:
        message = f"`{field}` is no language that the model knows: give a code such as en, nl or pt-BR."
        raise InvalidRequestError(message, param=field)
    return written, name
