"""Turns pictures and documents in a conversation into text, for a model that takes neither.

Agents read files with a tool, and the content stays in the conversation: a picture that a model refuses would be refused
with every later turn. So a picture that isn't in the user's last message becomes a short text, and a document becomes its own text.
This happens before translation, to conversations in any API's shape.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from supervisor.catalog.models.rewrite import Fields
from supervisor.errors import InvalidRequestError

Json = dict[str, Any]
RestoreText = Callable[[str], Awaitable[str]]
"""Restores a text that was cut: condensed JSON may have a mark for a part of the text."""
TextOf = Callable[[bytes], Awaitable[str]]
"""Returns the text of a PDF. Raises InvalidRequestError."""

PICTURES: Final = frozenset({"image_url", "input_image", "image"})
DOCUMENTS: Final = frozenset({"document", "file", "input_file"})
UNSEEN: Final = "[image: this model takes text only]"
_HINTS: Final = tuple(f'"{kind}"'.encode() for kind in (*sorted(PICTURES | DOCUMENTS), "images"))
_NO_TEXT: Final = "(This PDF has no text: its pages are pictures.)"
_ELSEWHERE: Final = "send the document itself, in base64; llmux opens no address and keeps no files of its kind."


def may_have_any(fields: Fields) -> bool:
    """May a request's conversation contain pictures or documents, so that it must be decoded? For most requests: no."""
    given = fields.get("messages", fields.get("input"))
    if given is None:
        return False
    conversation = bytes(given)
    return (b'"type"' in conversation and any(hint in conversation for hint in _HINTS)) or b'"images"' in conversation


@dataclass(slots=True)
class Place:
    """A part of a message: `content[index]`."""

    content: list[Any]
    index: int
    name: str  # such as `messages[3].content[1]`
    text_type: str  # the type of a text part at this place
    is_last_user_message: bool = False  # is it in the user's last message, without an answer yet?

    @property
    def part(self) -> Json:
        """The part itself."""
        part: Json = self.content[self.index]
        return part

    @property
    def kind(self) -> str:
        """The part's type, which may be anything."""
        return str(self.part.get("type"))

    def say(self, text: str) -> None:
        """Replace the part by a text."""
        self.content[self.index] = {"type": self.text_type, "text": text}


def places(messages: Sequence[Any], field: str) -> Iterator[Place]:
    """The parts of all messages, or items, also the parts within tool results."""
    last = _last_user_messages(messages)
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        for key in ("content", "output"):
            text_type = "input_text" if field == "input" else "text"
            for place in _content_places(message.get(key), f"{field}[{at}].{key}", text_type):
                place.is_last_user_message = at in last
                yield place


def _content_places(content: object, name: str, text_type: str) -> Iterator[Place]:
    for at, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, dict):
            continue
        if part.get("type") == "tool_result":
            yield from _content_places(part.get("content"), f"{name}[{at}].content", text_type)
        else:
            assert isinstance(content, list)
            yield Place(content, at, f"{name}[{at}]", text_type)


def _last_user_messages(messages: Sequence[Any]) -> range:
    """The positions of the user's last messages, if unanswered; none after a tool's result, because they belong to the result."""
    end = len(messages)
    while end and _role_of(messages[end - 1]) in ("system", "developer", "reasoning"):
        end -= 1
    begin = end
    while begin and _role_of(messages[begin - 1]) == "user":
        begin -= 1
    return range(0) if begin and _role_of(messages[begin - 1]) == "tool" else range(begin, end)


def _role_of(message: object) -> object:
    """A message's role; `tool` for a tool's result in any API's shape."""
    if not isinstance(message, dict):
        return None
    content, kind = message.get("content"), str(message.get("type"))
    parts = content if isinstance(content, list) else []
    if kind.endswith("_output") or any(isinstance(part, dict) and part.get("type") == "tool_result" for part in parts):
        return "tool"
    return message.get("role") or kind


def without_pictures(messages: Sequence[Any], field: str, refusal: str, *, refused: bool = False) -> list[str]:
    """Replace each picture by a text that mentions it. Returns the pictures' names.

    Raises InvalidRequestError for a picture in the user's last message; with `refused`, for any picture.
    """
    named: list[str] = []
    for place in places(messages, field):
        if place.kind in PICTURES:
            _refuse_picture(field, refusal, is_last_user_message=refused or place.is_last_user_message)
            place.say(UNSEEN)
            named.append(place.name)
    last = _last_user_messages(messages)
    for at, message in enumerate(messages):
        if isinstance(message, dict) and isinstance(message.get("images"), list) and message["images"]:  # Ollama's
            _refuse_picture(field, refusal, is_last_user_message=refused or at in last)
            del message["images"]
            message["content"] = "\n".join(filter(None, (str(message.get("content") or ""), UNSEEN)))
            named.append(f"{field}[{at}].images")
    return named


def _refuse_picture(field: str, refusal: str, *, is_last_user_message: bool) -> None:
    if is_last_user_message:
        raise InvalidRequestError(f"Could not process image: {refusal}", code="modality_unsupported", param=field)


# ----------------------------------------------------------------------------------------------------------- documents


@dataclass(slots=True)
class Document:
    """A document to become text: `text`, or the text of the PDF in `data`."""

    place: Place
    title: str
    text: str = ""
    data: bytes | None = None

    def read(self, text: str) -> None:
        """Put the document's text in its place."""
        self.place.say(f"Document: {self.title}\n\n{text or _NO_TEXT}")


async def read_documents(messages: Sequence[Any], field: str, whole: RestoreText, text_of: TextOf) -> bool:
    """Replace all documents by their texts. Was there a document?

    Raises InvalidRequestError for an unreadable document in the user's last message; any other becomes the error's text.
    """
    found = [place for place in places(messages, field) if place.kind in DOCUMENTS]
    for place in found:
        try:
            document = await _open_document(place, whole)
            document.read(document.text if document.data is None else await text_of(document.data))
        except InvalidRequestError as error:
            if place.is_last_user_message:
                raise
            place.say(f"[document: {error.message}]")
    return bool(found)


async def _open_document(place: Place, whole: RestoreText) -> Document:
    part = place.part
    source = part.get("source") if part["type"] == "document" else part.get("file", part)
    if not isinstance(source, dict):
        raise _document_error(place, _ELSEWHERE)
    title = str(part.get("title") or source.get("filename") or part.get("filename") or "without a name")[:200]
    if source.get("type") == "content":
        blocks = source.get("content")
        texts = (
            [block.get("text") for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else [blocks]
        )
        return Document(place, title, text="\n\n".join(text for text in texts if isinstance(text, str)))
    sent = source.get("data", source.get("file_data"))
    if not isinstance(sent, str):
        raise _document_error(place, _ELSEWHERE)
    sent = await whole(sent)
    if source.get("type") == "text":
        return Document(place, title, text=sent)
    try:
        data = base64.b64decode(sent.partition(",")[2] if sent.startswith("data:") else sent, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _document_error(place, "its data is no base64.") from error
    if data[:1024].lstrip().startswith(b"%PDF"):
        return Document(place, title, data=data)
    try:
        return Document(place, title, text=data.decode())
    except UnicodeDecodeError as error:
        raise _document_error(place, "it is neither a PDF nor text in UTF-8.") from error


def _document_error(place: Place, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"Could not process document: {why}", code="modality_unsupported", param=place.name)
