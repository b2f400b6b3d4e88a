"""Media in prompts come to workers as `data:` URLs or plain base64, never by reference.

Runtimes fetch the `http:` URLs and open the `file:` URLs and paths in a prompt. So a client could reach what only this
machine can reach, or read its files. A prompt's references are therefore found before a worker sees it: `media_loading`
rejects them, or puts the content in their place where the configuration allows that.

Text may contain URLs, unless the runtime says which texts are references (`TextReferences`). Else a reference is the value of
a key whose name means loading, in any part of a prompt, whatever the part's `type`: some workers look at nothing but the key.
Fields that only mention addresses may contain them: tools and their calls, citations, search results, and names such as
`callback_url`.

Media that come as content may still be of a kind that a model doesn't take. A part says by its `type` what it is, wherever it
stands: in a message, in a tool's result, in a document. `refuse_media` refuses these before the model is loaded for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec

from runtimes.base import TextReferences
from runtimes.model_config import Modality
from supervisor.catalog.models.rewrite import Fields
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.typed import UNREADABLE

_LOADED: Final = re.compile(
    r"(?!(?i:callback|notification|redirect|return|status|webhook)_?(?i:ur[li]s?)$)"
    r"(?:(?i:(?:.*_)?(?:image|img|audio|video|media|file|data|input|init|ref|source|document)*"
    r"(?:ur[li]|src|data|media|image|audio|video|file|path|mask)s?(?:\[\])?)"
    r"|(?i:base64)"  # Hugging Face's, which may be an address or a path all the same
    r"|.*(?:U(?i:r[li])|S(?i:rc)|D(?i:ata)|M(?i:edia)|I(?i:mage)|A(?i:udio)|V(?i:ideo)|F(?i:ile)|P(?i:ath))[sS]?)",
    re.DOTALL,
)
"""Without case, as some workers read keys; they would also take `ſ` for `s`."""
_PATH: Final = re.compile(r"(?i:(?:.*_)?(?:image|audio|video|media|file|data)*paths?)|.*P(?i:aths?)", re.DOTALL)
_LONGEST_KEY: Final = 100  # the end of a longer one tells
_SCHEME: Final = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,30}):")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/=_\s-]*+", re.ASCII)
_INERT_FIELDS: Final = frozenset(
    {
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "mcp_servers",
        "response_format",
        "structured_outputs",
        "guided_json",
        "output_config",
        "text",
        "json_schema",
        "grammar",
        "metadata",
        "chat_template_kwargs",
    }
)
_MEDIA: Final[Mapping[str, tuple[str, Modality | None]]] = {
    **dict.fromkeys(("image_url", "input_image", "image"), ("images", "image")),
    **dict.fromkeys(("video_url", "input_video", "video"), ("video", "image")),  # without images, no video
    **dict.fromkeys(("audio_url", "input_audio", "audio"), ("audio", "audio")),
    **dict.fromkeys(("document", "file", "input_file"), ("documents", None)),  # no runtime opens them
}
"""Types of parts → the media that they are, and the modality that a model needs for them."""
_INERT_TYPE: Final = re.compile(
    r"(?:input_|output_)?text|refusal|(?:redacted_)?thinking|reasoning|web_(?:search|fetch)_result|.*(?:_call|tool_use)",
    re.DOTALL,
)
"""Parts in which nothing lies deeper that is loaded, except below `_NESTING_KEYS` and keys that mean loading."""
_INERT_KEYS: Final = frozenset({"annotations", "citations", "tool_calls", "tools", "metadata"})
_NESTING_KEYS: Final = frozenset({"content", "output"})  # a prompt's parts may lie below these, whatever a type claims
_PLAIN_WORDS: Final = MappingProxyType(
    {"url": re.compile(r"web_(?:search|fetch)_result"), "data": re.compile(r"redacted_thinking|reasoning\..*")}
)
"""Keys that mean no loading in parts of these types."""
_BARE: Final = frozenset({"data", "base64"})
"""Keys whose content is base64 without more: those of sounds."""
_SHORTEST: Final = len('{"url":"a:"}')
_NUMBERS: Final = re.compile(rb"[\[\s]*[-\d]")
_USUAL: Final = frozenset({"role", "content", "type", "text", "name", "id"})  # no need to look at these closely
_JOINED: Final = frozenset({"content", "text"})  # chat templates put such texts one behind the other
_SLICE: Final = 1 << 20  # characters looked at between two turns of the loop
_STEPS: Final = 1000  # values looked at between two turns of the loop
_LARGE: Final = 64 * 1024  # a field that takes a noticeable time to decode
_USUAL_FIELDS: Final = frozenset(
    [
        "model",
        "messages",
        "stream",
        "stream_options",
        "input",
        "prompt",
        "instructions",
        "system",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "n",
        "seed",
        "stop",
        "user",
        "encoding_format",
        "dimensions",
    ]
)
"""No key here may match `_LOADED`."""


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message of text only. Never add a field here that can hold an object, or that `_LOADED` matches.

    What is missing stays so when it is encoded.
    """

    role: str
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    name: str | msgspec.UnsetType | None = msgspec.UNSET


_Inside = tuple[int | str, str, bool, Any]
"""A value in a list or an object: its index, its key, whether that means loading, itself."""
_texts: Final = msgspec.json.Decoder(list[_Message]).decode
_encode: Final = msgspec.json.Encoder().encode
_ESCAPED_COLON: Final = re.compile(rb"(?<!\\)(?:\\\\)*+\\u003[aA]")


@dataclass(frozen=True, slots=True)
class Reference:
    """Something that a worker would load from elsewhere, and where it stands in a request."""

    field: str  # of the request
    place: dict[str, Any] | list[Any]
    index: Any  # there: a number, or a key
    key: str
    text: str

    def replace(self, kind: str, content: str) -> None:
        """Put content, in base64, in the reference's place, in the shape of its API. `kind` is its media type."""
        if isinstance(self.place, dict) and self.key == self.place.get("type") == "url":  # a source of Anthropic's
            del self.place["url"]
            self.place.update(type="base64", media_type=kind, data=content)
        else:
            self.place[self.index] = content if self.key.casefold() in _BARE else f"data:{kind};base64,{content}"


@dataclass(frozen=True, slots=True)
class InText(Reference):
    """A reference within a text, between the texts that mark its beginning and end."""

    marks: TextReferences

    def replace(self, kind: str, content: str) -> None:
        """As `Reference.replace`; the rest of the text stays."""
        begin, end = self.marks.begin, self.marks.end
        old, new = f"{begin}{self.text}{end}", f"{begin}data:{kind};base64,{content}{end}"
        self.place[self.index] = self.place[self.index].replace(old, new)


class Texts:
    """All texts of a JSON request, for a worker that takes some of them for references."""

    def __init__(self, marks: TextReferences) -> None:
        self._marks = marks
        self._edge = len(marks.begin) - 1
        self._ends = ["", ""]  # of what came before, as a chat template may join texts: as they are, or trimmed

    def of(
        self, fields: Fields, value: Callable[[str], Any], decoded: dict[str, Any]
    ) -> Iterator[tuple[str, Any, Any, str] | None]:
        """Each text's field, place, index and key, in their order. None: other tasks may run now. See `references`.

        Raises InvalidRequestError for a reference in a key.
        """
        steps = 0
        for field, raw in fields.items():
            yield None
            if memoryview(raw)[0] not in b'"[{' or (_NUMBERS.match(raw) and b'"' not in bytes(raw)):
                continue
            if field not in decoded:
                decoded[field] = value(field)
                yield None
                refuse_duplicates(field, raw, decoded[field])
            values: list[tuple[Any, Any, str]] = [(decoded, field, field)]
            while values:
                place, index, key = values.pop()
                item = place[index]
                if isinstance(item, str):
                    yield field, place, index, key
                elif isinstance(item, dict):
                    values += [(item, inner, inner) for inner in reversed(item)]
                    if self._marks.begin in "\0".join(item):
                        raise refusal(field, "")
                elif isinstance(item, list):
                    values += [(item, inner, key) for inner in range(len(item) - 1, -1, -1)]
                steps += 1
                if steps % _STEPS == 0:
                    yield None

    def found(self, field: str, place: Any, index: Any, key: str, text: str) -> Iterator[InText | None]:
        """The references in a whole text that are not content themselves. Call it for each text in turn.

        Raises InvalidRequestError for half a reference, which another text could complete.
        """
        begin, end = self._marks.begin, self._marks.end
        if text.startswith("data:") and means_loading(key):  # the worker puts the marks around it
            if end in text:
                raise refusal(key, "")
            return
        if key in _JOINED:
            for number, trimmed in enumerate((text, text.strip())):
                cut = f"{trimmed[: self._edge]}\0{trimmed[-self._edge :]}" if len(trimmed) > self._edge else trimmed
                joined = self._ends[number] + cut
                if begin in joined:
                    raise refusal(key, "")
                self._ends[number] = joined[-self._edge :]
        at = 0
        while at < len(text):
            first = text.find(begin, at, at + _SLICE)
            if first < 0:
                at += _SLICE - self._edge
                yield None
                continue
            first += len(begin)
            last = text.find(end, first)
            if last < 0:
                raise refusal(key, "")
            if not text.startswith("data:", first):
                yield InText(field, place, index, key, text[first:last], self._marks)
            at = last + 1


def references(
    fields: Fields, value: Callable[[str], Any], types: set[str], decoded: dict[str, Any]
) -> Iterator[Reference | None]:
    """Look at a JSON request in slices: each None means that other tasks may run now.

    `fields` are its top-level fields, `value` decodes one of them; decoded fields are put into `decoded`, where they may be
    changed. Adds the `type` of every part to `types`. Raises InvalidRequestError for a key that stands twice in one object, and
    the errors of `value`.
    """
    values: list[tuple[str, str, bool, Any]] = []  # its field, its key, whether that means loading, itself
    for key, raw in fields.items():
        if key in _USUAL_FIELDS and len(raw) < _SHORTEST:
            continue
        if len(raw) > _LARGE:
            yield None
        is_nested = memoryview(raw)[0] in b"[{"
        if key in _USUAL_FIELDS and not is_nested:
            continue
        if key == "messages" and (texts := _texts_of(raw)) is not None:
            if len(raw) > _LARGE:
                yield None
            if _is_as_long(texts, raw):
                continue
        if key in _INERT_FIELDS or (is_nested and _NUMBERS.match(raw) and b'"' not in bytes(raw)):
            continue
        is_loaded = key not in _USUAL_FIELDS and means_loading(key)
        if is_loaded or is_nested:
            found = decoded[key] = value(key)
            if len(raw) > _LARGE:
                yield None
            refuse_duplicates(key, raw, found)
            if isinstance(found, list | dict):
                values.append((key, key, is_loaded, found))
            elif isinstance(found, str) and not is_content(key, found):
                yield Reference(key, decoded, key, key, found)
    steps = 0
    while values:
        field, key, is_loaded, item = values.pop()
        if isinstance(item, dict):
            inside: Iterator[_Inside] = _entries(key, item)
            if isinstance(kind := item.get("type"), str):
                types.add(kind)
        else:
            inside = _items(key, item, is_loaded=is_loaded)
        for index, inner_key, is_inner_loaded, inner in inside:
            steps += 1
            if steps % _STEPS == 0:
                yield None
            if isinstance(inner, list | dict):
                values.append((field, inner_key, is_inner_loaded, inner))
            elif is_inner_loaded and isinstance(inner, str) and not is_content(inner_key, inner):
                yield Reference(field, item, index, inner_key, inner)


def is_text(messages: msgspec.Raw) -> bool:
    """Is a prompt text only? Most are; decoding it into just that type proves it quickly."""
    texts = _texts_of(messages)
    return texts is not None and _is_as_long(texts, messages)


def _texts_of(messages: msgspec.Raw) -> list[_Message] | None:
    try:
        return _texts(messages)
    except UNREADABLE:
        return None


def _is_as_long(texts: list[_Message], messages: msgspec.Raw) -> bool:
    """Is the encoded value as long as `raw` without blanks? If not, a key stood twice: no JSON of the same texts is shorter."""
    length = len(_encode(texts))
    return length == len(messages) or length == len(msgspec.json.format(messages, indent=-1))


def refuse_duplicates(field: str, raw: msgspec.Raw, value: Any) -> None:
    """Raises InvalidRequestError where an object in a field, which is decoded as `value`, has the same key twice.

    Each key is followed by a colon. All others are within texts, where they may be escaped.
    """
    text = bytes(raw)
    colons = text.count(b":")
    if b"\\u003" in text:
        colons += len(_ESCAPED_COLON.findall(text))
    if colons != _encode(value).count(b":"):
        raise InvalidRequestError(f'"{field[:50]}" has the same key twice in one object.', code="duplicate_key")


def _items(key: str, items: list[Any], *, is_loaded: bool) -> Iterator[_Inside]:
    """The items of a list. The meaning of the list's `key` holds for them."""
    for index, item in enumerate(items):
        yield index, key, is_loaded, item


def _entries(name: str, part: dict[str, Any]) -> Iterator[_Inside]:
    """The values of an object that may matter. `name` is its own key."""
    kind = part.get("type")
    if not part.keys() <= _USUAL and any(key.casefold() == "type" != key for key in part):
        kind = None  # whoever reads without case takes either
    is_inert = isinstance(kind, str) and _INERT_TYPE.fullmatch(kind) is not None
    for key, value in part.items():
        is_loaded = key not in _USUAL and means_loading(key) and not _only_says(name, kind, key)
        if is_loaded or key.casefold() in _NESTING_KEYS or not (is_inert or key in _INERT_KEYS):
            yield key, key, is_loaded, value


def _only_says(name: str, kind: object, key: str) -> bool:
    """Is an address or a text only there to be read: a search result's `url`, a text document's `data`?"""
    if not isinstance(kind, str) or key not in _PLAIN_WORDS:
        return False
    return _PLAIN_WORDS[key].fullmatch(kind) is not None or (name == "source" and kind == "text" and key == "data")


def means_loading(key: str) -> bool:
    """Would a worker load something by the value of this key?"""
    return _LOADED.fullmatch(key[-_LONGEST_KEY:]) is not None


def is_content(key: str, text: str) -> bool:
    """Is this value content itself, a `data:` URL or base64, instead of a reference? Its `key` means loading."""
    if text[:64].lstrip()[:5].lower() == "data:":
        return True
    if _BASE64.fullmatch(text) is None:  # a parser of URLs passes over tabs and the like in `ht\tp:`
        return False
    text = text.lstrip()
    if _PATH.fullmatch(key):
        return not text
    # A path may have only base64's characters, too. JPEG begins with `/9j/`; MP3 with `//`, and as `data` alone.
    return not text.startswith("/") or text.startswith("/9j/") or (key.casefold() == "data" and text.startswith("//"))


def refusal(key: str, text: str, otherwise: str = "") -> InvalidRequestError:
    """The error for a reference of a kind that is never loaded, or anywhere while loading is off. `otherwise`: another remedy."""
    scheme = _SCHEME.match(text)
    what = f"a {scheme[1][:10]}: address" if scheme is not None else "something"
    return InvalidRequestError(
        f"{key[:50]} refers to {what}, which is not loaded for clients. "
        f"Send the content itself, as data:<type>;base64,<content>{otherwise}.",
        code="remote_media_refused",
        param=key[:50],
    )


def refuse_media(types: Collection[str], name: str, inputs: frozenset[Modality] | None, param: str) -> None:
    """Raises InvalidRequestError where the model called `name` doesn't take a part of one of these `types`.

    `inputs`: the modalities that it takes; None: unknown.
    """
    if inputs is None:
        return
    for kind in types:
        word, modality = _MEDIA.get(kind, ("", "text"))
        if word and modality not in inputs:
            takes = ", ".join(sorted(inputs))
            raise InvalidRequestError(f"{name} takes {takes}, no {word}.", code="modality_unsupported", param=param)
