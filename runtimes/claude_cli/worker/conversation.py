"""A chat completion as a prompt for a program: one text, and the system prompt apart.

Each field is used, refused by name, or reported as ignored. The program has no sampling options, so sampling fields are
ignored. Tools, pictures and response formats would change the answer, so they are refused. Null counts as absent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from runtimes.sdk.errors import WorkerError

_USED: Final = frozenset(("model", "messages", "stream", "stream_options"))
_SYSTEM: Final = ("system", "developer")
_ROLES: Final = (*_SYSTEM, "user", "assistant")
_TEXT_FIELDS: Final = {"text": "text", "refusal": "refusal"}
_EMPTY_VALUES: Final[tuple[object, ...]] = (None, False, "", [], {})
_CHANGES_ANSWER: Final[Mapping[str, tuple[object, ...]]] = {
    "tools": (),
    "functions": (),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "n": (1,),
    "logprobs": (),
    "top_logprobs": (0,),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
}
"""Field that the program can't support → its values that ask for nothing."""
_REFUSED_IN_MESSAGE: Final = ("tool_calls", "function_call", "audio")
_KNOWN_IN_MESSAGE: Final = frozenset(("role", "content", *_REFUSED_IN_MESSAGE))

_TEXT_ONLY: Final = "This model is a program that answers in text"
_INSTRUCTION: Final = (
    "This is a conversation so far. Reply with the assistant's next message alone, without any tags.\n\n"
)


@dataclass(frozen=True, slots=True)
class ProgramRequest:
    """The parsed request: prompt, system prompt and options for the program."""

    prompt: str
    system: str
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]


def parse_request(fields: Mapping[str, object]) -> ProgramRequest:
    """The request with these fields. Raises WorkerError."""
    for name, harmless in _CHANGES_ANSWER.items():
        value = fields.get(name)
        if value not in _EMPTY_VALUES and value not in harmless:
            raise WorkerError(f'{_TEXT_ONLY}: it has no "{name}". Leave it out.', param=name)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise WorkerError('"messages" must be a list of at least one message.', param="messages")
    known = _USED | _CHANGES_ANSWER.keys()
    ignored = [name for name, value in fields.items() if value is not None and name not in known]
    texts = [_read_message(message, f"messages[{at}]", ignored) for at, message in enumerate(messages)]
    turns = [(role, text) for role, text in texts if role not in _SYSTEM]
    if not turns or turns[-1][0] != "user":
        raise WorkerError('The last of "messages" must be the user\'s.', param="messages")
    options = fields.get("stream_options")
    ignored += _unknown_fields(options, {"include_usage"}, "stream_options") if isinstance(options, dict) else ()
    try:
        "".join(text for _, text in texts).encode()
    except UnicodeEncodeError as error:
        raise WorkerError('"messages" hold half a character.', param="messages") from error
    return ProgramRequest(
        prompt=turns[0][1]
        if len(turns) == 1
        else _INSTRUCTION + "\n".join(_in_tags(role, text) for role, text in turns),
        system="\n\n".join(text for role, text in texts if role in _SYSTEM and text),
        stream=fields.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        ignored=tuple(ignored),
    )


def _in_tags(role: str, text: str) -> str:
    return f"<{role}>\n{text}\n</{role}>"


def _unknown_fields(fields: Mapping[str, object], known: Collection[str], at: str) -> Iterator[str]:
    return (f"{at}.{name}" for name, value in fields.items() if value is not None and name not in known)


def _read_message(message: object, at: str, ignored: list[str]) -> tuple[str, str]:
    """The message's role and text. Adds fields without effect to `ignored`."""
    if not isinstance(message, dict):
        raise WorkerError(f'"{at}" must be an object.', param=at)
    role = message.get("role")
    if role in ("tool", "function"):
        raise WorkerError(f"{_TEXT_ONLY}: it knows no results of tools.", param=f"{at}.role")
    if role not in _ROLES:
        raise WorkerError(f'"{at}.role" must be system, developer, user or assistant.', param=f"{at}.role")
    for name in _REFUSED_IN_MESSAGE:
        if message.get(name) not in _EMPTY_VALUES:
            raise WorkerError(f'{_TEXT_ONLY}: it knows no "{name}".', param=f"{at}.{name}")
    content = message.get("content")
    if content is None and role == "assistant":
        content = message.pop("refusal", None) or ""
    ignored += _unknown_fields(message, _KNOWN_IN_MESSAGE, at)
    if isinstance(content, str):
        return role, content
    if not isinstance(content, list):
        raise WorkerError(f'"{at}.content" must be a text, or a list of parts.', param=f"{at}.content")
    return role, "\n".join(_read_parts(content, f"{at}.content", ignored))


def _read_parts(parts: list[object], at: str, ignored: list[str]) -> Iterator[str]:
    for number, part in enumerate(parts):
        fields = part if isinstance(part, dict) else {}
        kind = fields.get("type")
        name = _TEXT_FIELDS.get(kind, "") if isinstance(kind, str) else ""
        text = fields.get(name) if name else None
        if not isinstance(text, str):
            raise WorkerError(
                f'"{at}[{number}]" must be of type text: this model takes nothing else.',
                param=f"{at}[{number}]",
                code="modality_unsupported" if isinstance(kind, str) and not name else "invalid_request",
            )
        ignored += _unknown_fields(fields, ("type", name), f"{at}[{number}]")
        yield text
