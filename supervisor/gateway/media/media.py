"""Workers get media in prompts as `data:` URLs or plain base64, never by reference.

Runtimes fetch the `http:` URLs and open the `file:` URLs and paths in a prompt. So a client could reach this machine's private
network, or read its files. A prompt's references are therefore found before a worker gets the prompt: `media_loading` rejects
them, or replaces them by the content if the configuration allows that.

Text may contain URLs, unless the runtime defines texts as references (`TextReferences`). Otherwise a reference is the value of
a key whose name means loading, in any part of a prompt, whatever the part's `type`: some workers check only the key. Fields that
only mention addresses may contain them: tools and their calls, citations, search results, and names such as `callback_url`.

Media sent as content may still be of a kind that a model doesn't take. The `type` of a part gives its kind, in a message, in a
tool's result and in a document. `refuse_media` refuses such parts before the model is loaded for them.
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

_LOADING_KEY: Final = re.compile(
    r"(?!(?i:callback|notification|redirect|return|status|webhook)_?(?i:ur[li]s?)$)"
    r"(?:(?i:(?:.*_)?(?:image|img|audio|video|media|file|data|input|init|ref|source|document)*"
    r"(?:ur[li]|src|data|media|image|audio|video|file|path|mask)s?(?:\[\])?)"
    r"|(?i:base64)"  # Hugging Face's, which may be an address or a path all the same
    r"|.*(?:U(?i:r[li])|S(?i:rc)|D(?i:ata)|M(?i:edia)|I(?i:mage)|A(?i:udio)|V(?i:ideo)|F(?i:ile)|P(?i:ath))[sS]?)",
    re.DOTALL,
)
"""Case-insensitive, because some workers read keys so; these would also accept `ſ` for `s`."""
_PATH: Final = re.compile(r"(?i:(?:.*_)?(?:image|audio|video|media|file|data)*paths?)|.*P(?i:aths?)", re.DOTALL)
_LONGEST_KEY: Final = 100  # of a longer key, only the end is checked
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
    **dict.fromkeys(("document", "file", "input_file"), ("documents", None)),  # no runtime opens documents
}
"""Types of parts → the media's name, and the modality that a model needs for them."""
_INERT_TYPE: Final = re.compile(
    r"(?:input_|output_)?text|refusal|(?:redacted_)?thinking|reasoning|web_(?:search|fetch)_result|.*(?:_call|tool_use)",
    re.DOTALL,
)
"""Types of parts without nested references, except below `_NESTING_KEYS` and keys that mean loading."""
_INERT_KEYS: Final = frozenset({"annotations", "citations", "tool_calls", "tools", "metadata"})
_NESTING_KEYS: Final = frozenset({"content", "output"})  # these may have a prompt's parts below them, whatever the type
_INERT_KEYS_BY_TYPE: Final = MappingProxyType(
    {"url": re.compile(r"web_(?:search|fetch)_result"), "data": re.compile(r"redacted_thinking|reasoning\..*")}
)
"""Keys that mean no loading in parts of these types."""
_PLAIN_BASE64_KEYS: Final = frozenset({"data", "base64"})
"""Keys whose content is plain base64 without a `data:` prefix: those of sounds."""
_SHORTEST: Final = len('{"url":"a:"}')
_NUMBER_LIST: Final = re.compile(rb"[\[\s]*[-\d]")
_USUAL: Final = frozenset({"role", "content", "type", "text", "name", "id"})  # these need no check
_JOINED_KEYS: Final = frozenset({"content", "text"})  # chat templates join such texts
_SLICE: Final = 1 << 20  # characters checked between two turns of the loop
_STEPS_PER_TURN: Final = 1000  # values checked between two turns of the loop
_LARGE_BYTES: Final = 64 * 1024  # a larger field takes a noticeable time to decode
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
"""No key here may match `_LOADING_KEY`."""


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message of text only. Never add a field here that can have an object, or that `_LOADING_KEY` matches.

    Encoding leaves missing fields out.
    """

    role: str
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    name: str | msgspec.UnsetType | None = msgspec.UNSET


_InnerValue = tuple[int | str, str, bool, Any]
"""A value in a list or an object: its index, its key, whether the key means loading, and the value."""
_decode_messages: Final = msgspec.json.Decoder(list[_Message]).decode
_encode: Final = msgspec.json.Encoder().encode
_ESCAPED_COLON: Final = re.compile(rb"(?<!\\)(?:\\\\)*+\\u003[aA]")


@dataclass(frozen=True, slots=True)
class Reference:
    """A value that would make a worker load something, and its place in a request."""

    field: str  # of the request
    place: dict[str, Any] | list[Any]
    index: Any  # in `place`: a number, or a key
    key: str
    text: str

    def replace(self, kind: str, content: str) -> None:
        """Replace the reference by content in base64, in the shape of its API. `kind` is the media type."""
        if isinstance(self.place, dict) and self.key == self.place.get("type") == "url":  # a source of Anthropic's
            del self.place["url"]
            self.place.update(type="base64", media_type=kind, data=content)
        else:
            self.place[self.index] = (
                content if self.key.casefold() in _PLAIN_BASE64_KEYS else f"data:{kind};base64,{content}"
            )


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
    """All texts of a JSON request, for a worker that reads references within texts."""

    def __init__(self, marks: TextReferences) -> None:
        self._marks = marks
        self._edge = len(marks.begin) - 1
        self._ends = ["", ""]  # of the texts before, since a chat template may join texts: untrimmed, and trimmed

    def of(
        self, fields: Fields, value: Callable[[str], Any], decoded: dict[str, Any]
    ) -> Iterator[tuple[str, Any, Any, str] | None]:
        """The field, place, index and key of each text, in order. None: other tasks may run now. See `references`.

        Raises InvalidRequestError for a reference in a key.
        """
        steps = 0
        for field, raw in fields.items():
            yield None
            if memoryview(raw)[0] not in b'"[{' or (_NUMBER_LIST.match(raw) and b'"' not in bytes(raw)):
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
                if steps % _STEPS_PER_TURN == 0:
                    yield None

    def found(self, field: str, place: Any, index: Any, key: str, text: str) -> Iterator[InText | None]:
        """The references in a whole text that are not content themselves. Call this for each text, in order.

        Raises InvalidRequestError for half a reference, which another text could complete.
        """
        begin, end = self._marks.begin, self._marks.end
        if text.startswith("data:") and means_loading(key):  # the worker itself adds the marks
            if end in text:
                raise refusal(key, "")
            return
        if key in _JOINED_KEYS:
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
    """The references in a JSON request, found in slices: each None means that other tasks may run now.

    `fields` are its top-level fields, `value` decodes a field; decoded fields are put into `decoded`, where they may be
    changed. Adds the `type` of every part to `types`. Raises InvalidRequestError for a duplicate key in an object, and the errors
    of `value`.
    """
    values: list[tuple[str, str, bool, Any]] = []  # field, key, whether the key means loading, value
    for key, raw in fields.items():
        if key in _USUAL_FIELDS and len(raw) < _SHORTEST:
            continue
        if len(raw) > _LARGE_BYTES:
            yield None
        is_nested = memoryview(raw)[0] in b"[{"
        if key in _USUAL_FIELDS and not is_nested:
            continue
        if key == "messages" and (texts := _decode_text_messages(raw)) is not None:
            if len(raw) > _LARGE_BYTES:
                yield None
            if _has_no_duplicates(texts, raw):
                continue
        if key in _INERT_FIELDS or (is_nested and _NUMBER_LIST.match(raw) and b'"' not in bytes(raw)):
            continue
        is_loaded = key not in _USUAL_FIELDS and means_loading(key)
        if is_loaded or is_nested:
            found = decoded[key] = value(key)
            if len(raw) > _LARGE_BYTES:
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
            inside: Iterator[_InnerValue] = _object_values(key, item)
            if isinstance(kind := item.get("type"), str):
                types.add(kind)
        else:
            inside = _list_values(key, item, is_loaded=is_loaded)
        for index, inner_key, is_inner_loaded, inner in inside:
            steps += 1
            if steps % _STEPS_PER_TURN == 0:
                yield None
            if isinstance(inner, list | dict):
                values.append((field, inner_key, is_inner_loaded, inner))
            elif is_inner_loaded and isinstance(inner, str) and not is_content(inner_key, inner):
                yield Reference(field, item, index, inner_key, inner)


def is_text(messages: msgspec.Raw) -> bool:
    """Is a prompt text only? Most prompts are; decoding the prompt into `_Message` shows that quickly."""
    texts = _decode_text_messages(messages)
    return texts is not None and _has_no_duplicates(texts, messages)


def _decode_text_messages(messages: msgspec.Raw) -> list[_Message] | None:
    try:
        return _decode_messages(messages)
    except UNREADABLE:
        return None


def _has_no_duplicates(texts: list[_Message], messages: msgspec.Raw) -> bool:
    """Is the encoded value as long as `messages` without blanks? If not, there is a duplicate key: no JSON of these texts is shorter."""
    length = len(_encode(texts))
    return length == len(messages) or length == len(msgspec.json.format(messages, indent=-1))


def refuse_duplicates(field: str, raw: msgspec.Raw, value: Any) -> None:
    """Raises InvalidRequestError if an object in a field, whose decoded value is `value`, has the same key twice.

    A colon follows each key. All other colons are within texts, where they may be escaped.
    """
    text = bytes(raw)
    colons = text.count(b":")
    if b"\\u003" in text:
        colons += len(_ESCAPED_COLON.findall(text))
    if colons != _encode(value).count(b":"):
        raise InvalidRequestError(f'"{field[:50]}" has the same key twice in one object.', code="duplicate_key")


def _list_values(key: str, items: list[Any], *, is_loaded: bool) -> Iterator[_InnerValue]:
    """The items of a list. The list's `key` applies to each item."""
    for index, item in enumerate(items):
        yield index, key, is_loaded, item


def _object_values(name: str, part: dict[str, Any]) -> Iterator[_InnerValue]:
    """The values of an object that may be or contain references. `name` is the object's key."""
    kind = part.get("type")
    if not part.keys() <= _USUAL and any(key.casefold() == "type" != key for key in part):
        kind = None  # a case-insensitive worker may read the other key
    is_inert = isinstance(kind, str) and _INERT_TYPE.fullmatch(kind) is not None
    for key, value in part.items():
        is_loaded = key not in _USUAL and means_loading(key) and not _is_only_read(name, kind, key)
        if is_loaded or key.casefold() in _NESTING_KEYS or not (is_inert or key in _INERT_KEYS):
            yield key, key, is_loaded, value


def _is_only_read(name: str, kind: object, key: str) -> bool:
    """Is a value never loaded, but only read: a search result's `url`, a text document's `data`?"""
    if not isinstance(kind, str) or key not in _INERT_KEYS_BY_TYPE:
        return False
    return _INERT_KEYS_BY_TYPE[key].fullmatch(kind) is not None or (
        name == "source" and kind == "text" and key == "data"
    )


def means_loading(key: str) -> bool:
    """May a worker load something by the value of this key?"""
    return _LOADING_KEY.fullmatch(key[-_LONGEST_KEY:]) is not None


def is_content(key: str, text: str) -> bool:
    """Is this value content itself, a `data:` URL or base64, instead of a reference? Its `key` means loading."""
    if text[:64].lstrip()[:5].lower() == "data:":
        return True
    if _BASE64.fullmatch(text) is None:  # a parser of URLs skips tabs and the like in `ht\tp:`
        return False
    text = text.lstrip()
    if _PATH.fullmatch(key):
        return not text
    # A path may also consist of base64's characters. JPEG begins with `/9j/`; MP3 with `//`, and only under the key `data`.
    return not text.startswith("/") or text.startswith("/9j/") or (key.casefold() == "data" and text.startswith("//"))


def refusal(key: str, text: str, otherwise: str = "") -> InvalidRequestError:
    """The error for a reference of a kind that is never loaded, or for any while loading is off. `otherwise`: another remedy."""
    scheme = _SCHEME.match(text)
    what = f"a {scheme[1][:10]}: address" if scheme is not None else "something"
    return InvalidRequestError(
        f"{key[:50]} refers to {what}, which is not loaded for clients. "
        f"Send the content itself, as data:<type>;base64,<content>{otherwise}.",
        code="remote_media_refused",
        param=key[:50],
    )


def refuse_media(types: Collection[str], name: str, inputs: frozenset[Modality] | None, param: str) -> None:
    """Raises InvalidRequestError if the model `name` doesn't take parts of one of these `types`.

    `inputs`: the modalities that the model takes; None: unknown.
    """
    if inputs is None:
        return
    for kind in types:
        word, modality = _MEDIA.get(kind, ("", "text"))
        if word and modality not in inputs:
            takes = ", ".join(sorted(inputs))
            raise InvalidRequestError(f"{name} takes {takes}, no {word}.", code="modality_unsupported", param=param)
