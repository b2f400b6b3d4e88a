"""What a person does with the home server, by OpenAI's client; each checks that the answer is one."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import openai

from tests.support import hearing, tiny

HELLO = [{"role": "user", "content": "Hello"}]


@dataclass
class Answer:
    """What a chat came to, in one piece or as a stream."""

    said: str = ""
    thought: str = ""
    calls: list[list[str]] = field(default_factory=list)  # function and arguments
    finish: str | None = None
    prompt_tokens: int = 0


def whole(sdk: openai.OpenAI, **body: object) -> Answer:
    answer = sdk.chat.completions.create(**body)
    (choice,) = answer.choices
    message = choice.message
    thought = getattr(message, "reasoning_content", None) or ""
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
    return Answer(message.content or "", thought, calls, choice.finish_reason, answer.usage.prompt_tokens)


def streamed(sdk: openai.OpenAI, **body: object) -> Answer:
    found = Answer()
    for chunk in sdk.chat.completions.create(stream=True, stream_options={"include_usage": True}, **body):
        found.prompt_tokens = chunk.usage.prompt_tokens if chunk.usage else found.prompt_tokens
        for choice in chunk.choices:
            found.finish = choice.finish_reason or found.finish
            found.said += choice.delta.content or ""
            found.thought += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(found.calls):
                    found.calls.append([call.function.name, ""])
                found.calls[call.index][1] += call.function.arguments
    return found


def chat(sdk: openai.OpenAI, model: str) -> None:
    assert whole(sdk, model=model, messages=HELLO).said.startswith(tiny.ANSWER)


def transcribe(sdk: openai.OpenAI, name: str = "speech.mp3", **fields: object) -> object:
    file = io.BytesIO((hearing.sounds() / name).read_bytes())
    file.name = name
    answer = sdk.audio.transcriptions.create(model="cohere-transcribe", file=file, **fields)
    assert answer.text == hearing.COHERE_SAID
    return answer


def speak(sdk: openai.OpenAI, model: str, voice: str = "alloy", **fields: object) -> bytes:
    sound = sdk.audio.speech.create(model=model, voice=voice, input="Good morning.", **fields).content
    assert len(sound) > 1000
    return sound
