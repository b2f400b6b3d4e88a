"""Languages by their codes (ISO 639), with the English names that OpenAI's answers use."""

from __future__ import annotations

from collections.abc import Container
from types import MappingProxyType
from typing import Final

_NAMES = """
af afrikaans, am amharic, ar arabic, as assamese, az azerbaijani, ba bashkir, be belarusian, bg bulgarian, bn bengali,
bo tibetan, br breton, bs bosnian, ca catalan, cs czech, cy welsh, da danish, de german, el greek, en english,
es spanish, et estonian, eu basque, fa persian, fi finnish, fo faroese, fr french, gl galician, gu gujarati, ha hausa,
haw hawaiian, he hebrew, hi hindi, hr croatian, ht haitian creole, hu hungarian, hy armenian, id indonesian,
is icelandic, it italian, ja japanese, jw javanese, ka georgian, kk kazakh, km khmer, kn kannada, ko korean, la latin,
lb luxembourgish, ln lingala, lo lao, lt lithuanian, lv latvian, mg malagasy, mi maori, mk macedonian, ml malayalam,
mn mongolian, mr marathi, ms malay, mt maltese, my myanmar, ne nepali, nl dutch, nn nynorsk, no norwegian, oc occitan,
pa punjabi, pl polish, ps pashto, pt portuguese, ro romanian, ru russian, sa sanskrit, sd sindhi, si sinhala,
sk slovak, sl slovenian, sn shona, so somali, sq albanian, sr serbian, su sundanese, sv swedish, sw swahili, ta tamil,
te telugu, tg tajik, th thai, tk turkmen, tl tagalog, tr turkish, tt tatar, uk ukrainian, ur urdu, uz uzbek,
vi vietnamese, yi yiddish, yo yoruba, yue cantonese, zh chinese
"""

NAMES: Final = MappingProxyType(
    {code: name for code, _, name in (item.strip().partition(" ") for item in _NAMES.replace("\n", " ").split(","))}
)
"""English name by code."""

_OTHER: Final = MappingProxyType(
    {"burmese": "my", "castilian": "es", "flemish": "nl", "mandarin": "zh", "valencian": "ca", "jv": "jw", "nb": "no"}
    | {name: code for code, name in NAMES.items()}
)


def code_of(text: str, known: Container[str]) -> str | None:
    """The code that `en`, `EN`, `en-US` or `English` means, if it is among `known`."""
    word = text.strip().lower()
    base = word.replace("_", "-").partition("-")[0]
    return next((code for code in (word, _OTHER.get(word), base, _OTHER.get(base)) if code and code in known), None)
