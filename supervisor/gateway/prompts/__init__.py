"""Chats with workers that only complete texts. The gateway writes the prompt, and turns the completion into a chat completion.

A model's `prompt_format` selects the format. Its requests arrive here as chat completions, whatever API the client speaks, after
the model's parameters were added; `conversation` reads the messages, `formats` writes the prompt, `answer` translates the answer.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from supervisor.catalog.models.prompt_format import COMPLETIONS, PromptFormat
from supervisor.catalog.models.rewrite import Fields
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.typed import UNREADABLE
from supervisor.gateway.prompts.answer import Chats
from supervisor.gateway.prompts.conversation import Conversation
from supervisor.gateway.prompts.formats import WRITERS, PromptInput

_encode: Final = msgspec.json.Encoder().encode
_NULL: Final = b"null"

_UNSUPPORTED_FIELDS: Final[dict[str, tuple[object, ...]]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
"""Fields of chats that completions don't have → the values that have no effect anyway."""

_IGNORED_FIELDS: Final = ("parallel_tool_calls", "verbosity", "reasoning_format", "prediction")
_CONVERTED_FIELDS: Final = ("messages", "chat_template_kwargs", "reasoning_effort", "max_completion_tokens", "stop")
_THOUGHT_MARKS: Final = ("<|channel>", "<channel|>")


class Completions:
    """The `Translation` of chats with the model `name`."""

    path: Final = COMPLETIONS

    def __init__(self, prompts: PromptFormat, name: str) -> None:
        self._prompts = prompts
        self._name = name

    def request(self, fields: Fields) -> tuple[Fields, Chats]:
        """See Translation."""
        self._refuse_unsupported(fields)
        conversation = Conversation(fields.get("messages"), self._name)
        ignored = [*conversation.ignored, *(name for name in _IGNORED_FIELDS if _is_given(fields, name))]
        thinks = self._wants_thinking(fields, ignored)
        prompt = WRITERS[self._prompts.name](PromptInput(conversation.turns, thinks, self._name))
        if not self._prompts.translates:
            ignored += (
                f"messages[{at}].content.{code}"
                for at, turn in enumerate(conversation.turns)
                for code in turn.languages
            )
        most = "max_completion_tokens" if _is_given(fields, "max_completion_tokens") else "max_tokens"
        kept = {
            name: value
            for name, value in fields.items()
            if name not in _UNSUPPORTED_FIELDS and name not in _IGNORED_FIELDS and name not in _CONVERTED_FIELDS
        }
        completion: Fields = {
            **kept,
            "prompt": msgspec.Raw(_encode(prompt)),
            # Null: up to the end of the context. Without this field, vLLM ends after 16 tokens.
            "max_tokens": fields.get(most, msgspec.Raw(_NULL)),
            **self._stop_field(fields),
        }
        if (
            thinks and self._prompts.name == "gemma4_template"
        ):  # its marks are special tokens, which workers leave out by default
            completion["preserved_tokens"] = msgspec.Raw(_encode(_THOUGHT_MARKS))  # llama.cpp's
            completion["skip_special_tokens"] = msgspec.Raw(b"false")  # vLLM's
        return completion, Chats(ignored, self._prompts if thinks else None)

    def _refuse_unsupported(self, fields: Fields) -> None:
        for name, harmless in _UNSUPPORTED_FIELDS.items():
            if _is_given(fields, name) and _decode_field(fields, name) not in harmless:
                message = (
                    f"{self._name} gets its prompts in the format {self._prompts.name}, which has no place for `{name}`: "
                    "leave it out."
                )
                raise InvalidRequestError(message, param=name, code="unsupported_parameter")

    def _wants_thinking(self, fields: Fields, ignored: list[str]) -> bool:
        """Should the model think first? Fields without effect are added to `ignored`."""
        arguments = _decode_field(fields, "chat_template_kwargs") or {}
        if not isinstance(arguments, dict):
            raise InvalidRequestError('"chat_template_kwargs" must be an object.', param="chat_template_kwargs")
        ignored += (f"chat_template_kwargs.{name}" for name in arguments if name != "enable_thinking")
        wanted, effort = arguments.get("enable_thinking"), _decode_field(fields, "reasoning_effort")
        if self._prompts.thinks is None:
            ignored += ["chat_template_kwargs.enable_thinking"] if wanted else []
            ignored += ["reasoning_effort"] if effort not in (None, "none") else []
            return False
        if wanted is None:
            return self._prompts.thinks if effort is None else effort != "none"
        if effort is not None and bool(wanted) != (effort != "none"):
            ignored.append("reasoning_effort")
        return bool(wanted)

    def _stop_field(self, fields: Fields) -> Fields:
        """The stop strings of the format and of the request."""
        texts = _decode_field(fields, "stop")
        stop = [texts] if isinstance(texts, str) else texts or []
        if not (isinstance(stop, list) and all(isinstance(text, str) for text in stop)):
            raise InvalidRequestError('"stop" must be a text or a list of texts.', param="stop")
        merged = [*dict.fromkeys((*stop, *self._prompts.stop))]
        return {"stop": msgspec.Raw(_encode(merged))} if merged else {}


def _is_given(fields: Fields, name: str) -> bool:
    return bytes(fields.get(name, _NULL)) != _NULL


def _decode_field(fields: Fields, name: str) -> Any:
    try:
        return msgspec.json.decode(fields.get(name, _NULL))
    except UNREADABLE as error:
        raise InvalidRequestError(f"`{name}` can't be read: {error}.", param=name) from error
