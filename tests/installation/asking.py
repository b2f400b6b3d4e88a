"""What a person does with the home server, by OpenAI's client; each checks that the answer is one."""

from __future__ import annotations

import io

import openai

from tests import hearing, tiny

HELLO = [{"role": "user", "content": "Hello"}]


def chat(sdk: openai.OpenAI, model: str) -> str:
    answer = sdk.chat.completions.create(model=model, messages=HELLO)
    said = answer.choices[0].message.content
    assert said.startswith(tiny.ANSWER)
    return said


def transcribe(sdk: openai.OpenAI, spoken: str, **fields: object) -> str:
    file = io.BytesIO((hearing.sounds(spoken) / "speech.mp3").read_bytes())
    file.name = "speech.mp3"
    answer = sdk.audio.transcriptions.create(model="cohere-transcribe", file=file, **fields)
    assert answer.text == hearing.COHERE_SAID
    return answer


def speak(sdk: openai.OpenAI, model: str, voice: str = "alloy", **fields: object) -> bytes:
    sound = sdk.audio.speech.create(model=model, voice=voice, input="Good morning.", **fields).content
    assert len(sound) > 1000
    return sound
