"""One conversation through four APIs, on real workers of three runtimes: text, pictures, tools, thoughts, formats."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import httpx
import pytest

from tests.support import build_vllm, environments, tiny, tiny_language
from tests.support.asking import WEATHER, picture
from tests.support.daemon import running

THOUGHT = tiny.THOUGHT
PARIS = ["get_weather", {"city": "Paris"}]
SCHEMA = {"type": "string", "enum": ["Oslo"]}  # no place for blanks, of which tiny models may write endless ones
RED = picture(56, 56)
ANSWERS = {"llama_server": tiny.ANSWER, "transformers": tiny_language.ANSWER, "vllm_serve": tiny_language.ANSWER}


@dataclass
class Question:
    """What is asked, whatever the API."""

    picture: bool = False
    tool: bool = False
    called: bool = False  # the tool has been, and its result is told
    thinks: bool | None = None
    schema: bool = False


@dataclass
class Answer:
    """What came back, whatever the API."""

    text: str = ""
    thought: str = ""
    calls: list[list[object]] = field(default_factory=list)  # name, arguments


def _events(told: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in told.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


class Chat:
    """OpenAI's chat completions."""

    path = "/v1/chat/completions"

    def body(self, asked: Question) -> dict:
        seen = [{"type": "image_url", "image_url": {"url": RED}}] if asked.picture else []
        messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, *seen]}]
        if asked.called:
            call = {"id": "c1", "type": "function", "function": {"name": PARIS[0], "arguments": json.dumps(PARIS[1])}}
            messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
            messages += [{"role": "tool", "tool_call_id": "c1", "content": "rain"}]
        body = {"messages": messages, "max_tokens": 200}
        if asked.tool:
            body["tools"] = [WEATHER]
        if asked.thinks is not None:
            body["chat_template_kwargs"] = {"enable_thinking": asked.thinks}
        if asked.schema:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        return body

    def read(self, told: httpx.Response) -> Answer:
        message = told.json()["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        thought = message.get("reasoning_content") or message.get("reasoning") or ""
        return Answer(message["content"] or "", thought, [[name, json.loads(text)] for name, text in calls])

    def read_stream(self, told: httpx.Response) -> Answer:
        found, calls = Answer(), []
        for event in _events(told):
            for choice in event["choices"]:
                delta = choice["delta"]
                found.text += delta.get("content") or ""
                found.thought += delta.get("reasoning_content") or delta.get("reasoning") or ""
                for call in delta.get("tool_calls") or []:
                    if call["index"] == len(calls):
                        calls.append([call["function"]["name"], ""])
                    calls[call["index"]][1] += call["function"].get("arguments") or ""
        found.calls = [[name, json.loads(text)] for name, text in calls]
        return found


class Responses:
    """OpenAI's responses."""

    path = "/v1/responses"

    def body(self, asked: Question) -> dict:
        seen = [{"type": "input_image", "image_url": RED, "detail": "auto"}] if asked.picture else []
        items = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}, *seen]}]
        if asked.called:
            call = {"type": "function_call", "call_id": "c1", "name": PARIS[0], "arguments": json.dumps(PARIS[1])}
            items += [call, {"type": "function_call_output", "call_id": "c1", "output": "rain"}]
        body = {"input": items, "max_output_tokens": 200}
        if asked.tool:
            body["tools"] = [{"type": "function", **WEATHER["function"]}]
        if asked.thinks is not None:
            body["reasoning"] = {"effort": "medium" if asked.thinks else "none"}
        if asked.schema:
            body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        return body

    def read(self, told: httpx.Response) -> Answer:
        return self._of(told.json())

    def read_stream(self, told: httpx.Response) -> Answer:
        *_, last = _events(told)
        assert last["type"] == "response.completed"
        return self._of(last["response"])

    def _of(self, response: dict) -> Answer:
        found = Answer()
        for item in response["output"]:
            match item["type"]:
                case "message":
                    found.text += "".join(part["text"] for part in item["content"])
                case "reasoning":
                    found.thought += "".join(part["text"] for part in item["content"] or item["summary"])
                case "function_call":
                    found.calls.append([item["name"], json.loads(item["arguments"])])
        return found


class Messages:
    """Anthropic's messages."""

    path = "/v1/messages"

    def body(self, asked: Question) -> dict:
        data = {"type": "base64", "media_type": "image/png", "data": RED.partition(",")[2]}
        seen = [{"type": "image", "source": data}] if asked.picture else []
        messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, *seen]}]
        if asked.called:
            call = {"type": "tool_use", "id": "c1", "name": PARIS[0], "input": PARIS[1]}
            result = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}
            messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        body = {"messages": messages, "max_tokens": 200}
        if asked.tool:
            given = WEATHER["function"]
            body["tools"] = [{"name": given["name"], "input_schema": given["parameters"]}]
        if asked.thinks is not None:
            body["thinking"] = {"type": "adaptive"} if asked.thinks else {"type": "disabled"}
        if asked.schema:
            body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
        return body

    def read(self, told: httpx.Response) -> Answer:
        return self._of(told.json()["content"])

    def read_stream(self, told: httpx.Response) -> Answer:
        blocks = []
        for event in _events(told):
            match event["type"]:
                case "content_block_start":
                    blocks.append({**event["content_block"], "json": ""})
                case "content_block_delta":
                    delta, block = event["delta"], blocks[event["index"]]
                    if (kind := delta["type"]) == "input_json_delta":
                        block["json"] += delta["partial_json"]
                    elif kind != "signature_delta":
                        key = kind.removesuffix("_delta")
                        block[key] += delta[key]
        for block in blocks:
            block["input"] = json.loads(block.pop("json") or "{}")
        return self._of(blocks)

    def _of(self, blocks: list[dict]) -> Answer:
        found = Answer()
        for block in blocks:
            match block["type"]:
                case "text":
                    found.text += block["text"]
                case "thinking":
                    found.thought += block["thinking"]
                case "tool_use":
                    found.calls.append([block["name"], block["input"]])
        return found


class Ollama:
    """Ollama's chat."""

    path = "/api/chat"

    def body(self, asked: Question) -> dict:
        messages = [{"role": "user", "content": "Hello"}]
        if asked.picture:
            messages[0]["images"] = [RED.partition(",")[2]]
        if asked.called:
            call = {"function": {"name": PARIS[0], "arguments": PARIS[1]}}
            messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
            messages += [{"role": "tool", "tool_name": PARIS[0], "content": "rain"}]
        body = {"messages": messages, "options": {"num_predict": 200}, "stream": False}
        if asked.tool:
            body["tools"] = [WEATHER]
        if asked.thinks is not None:
            body["think"] = asked.thinks
        if asked.schema:
            body["format"] = SCHEMA
        return body

    def read(self, told: httpx.Response) -> Answer:
        return self._of([told.json()])

    def read_stream(self, told: httpx.Response) -> Answer:
        return self._of([json.loads(line) for line in told.text.splitlines()])

    def _of(self, pieces: list[dict]) -> Answer:
        found = Answer()
        for piece in pieces:
            message = piece["message"]
            found.text += message["content"]
            found.thought += message.get("thinking") or ""
            calls = [call["function"] for call in message.get("tool_calls") or []]
            found.calls += [[call["name"], call["arguments"]] for call in calls]
        return found


def _llama_server(_folder) -> tuple[dict, dict]:
    model = {"runtime": "llama_server", "path": str(tiny.model()), "mmproj": str(tiny.projector()), "n_ctx": 4096}
    return model, {"runtimes_dir": str(tiny.runtimes_dir())}


def _transformers(_folder) -> tuple[dict, dict]:
    model = {"runtime": "transformers", "path": str(tiny_language.model("qwen3_5_vision")), "threads": 1, "n_ctx": 4096}
    return model, {"runtimes_dir": str(environments.installed("transformers"))}


def _vllm_serve(folder) -> tuple[dict, dict]:
    program = build_vllm.find()
    if program is None:
        pytest.skip("there is no vLLM here; make test-vllm installs one")
    model = {
        "runtime": "vllm_serve",
        "path": str(tiny_language.model()),
        "binary": str(program),
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 256 << 20,
        "extra_args": ["--enforce-eager"],
        "reasoning_parser": "qwen3",
        "tool_call_parser": "hermes",
    }
    return model, {}


RUNTIMES = {"llama_server": _llama_server, "transformers": _transformers, "vllm_serve": _vllm_serve}


@pytest.fixture(scope="module", params=RUNTIMES)
def runtime(request):
    return request.param


@pytest.fixture(scope="module")
def daemon(runtime, tmp_path_factory):
    folder = tmp_path_factory.mktemp(runtime)
    model, server = RUNTIMES[runtime](folder)
    with running(folder, {"models": {"tiny": model}, "server": server}) as started:
        started.post("/v1/admin/models/tiny/load")
        started.wait_state("tiny", "ready", 300)
        yield started


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def ask(request, daemon):
    def asked(dialect, question: Question) -> Answer:
        body = dialect.body(question) | {"model": "tiny", "stream": request.param}
        told = daemon.post(dialect.path, json=body)
        assert told.status_code == 200, told.text
        return dialect.read_stream(told) if request.param else dialect.read(told)

    return asked


@pytest.mark.parametrize("dialect", [Chat(), Responses(), Messages(), Ollama()], ids=lambda one: one.path)
class TestSameAnswer:
    """Whoever asks, and whatever runs the model."""

    def test_text_after_thoughts(self, ask, runtime, dialect):
        found = ask(dialect, Question(thinks=True))
        assert (found.text.strip(), found.thought.strip(), found.calls) == (ANSWERS[runtime], THOUGHT, [])

    def test_no_thoughts(self, ask, runtime, dialect):
        found = ask(dialect, Question(thinks=False))
        assert (found.text.strip(), found.thought) == (ANSWERS[runtime], "")

    def test_a_picture(self, ask, runtime, dialect):
        if runtime == "vllm_serve":
            pytest.skip("vLLM's models with eyes need torchvision, which has no build for torch's processor build")
        assert ask(dialect, Question(picture=True)).text.strip() == ANSWERS[runtime]

    def test_a_call(self, ask, dialect):
        assert ask(dialect, Question(tool=True)).calls == [PARIS]

    def test_an_answer_by_a_tools_result(self, ask, runtime, dialect):
        found = ask(dialect, Question(tool=True, called=True))
        assert (found.text.strip(), found.calls) == (ANSWERS[runtime], [])

    def test_a_format(self, ask, dialect):
        assert json.loads(ask(dialect, Question(schema=True, thinks=False)).text) == "Oslo"


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_that_ended_an_answer(daemon, stream):
    """Anthropic's API alone tells it."""
    asked = Messages().body(Question(thinks=True)) | {"stop_sequences": ["zzz", " tiny"]}
    told = daemon.post(Messages.path, json=asked | {"model": "tiny", "stream": stream})
    (ended,) = [event["delta"] for event in _events(told) if event["type"] == "message_delta"] or [told.json()]
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", " tiny")
