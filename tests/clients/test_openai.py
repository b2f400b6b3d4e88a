"""What OpenAI's own Python client, and clients of other dialects, get from a real llama.cpp worker."""

from __future__ import annotations

import json

import openai
import pytest

from tests.e2e.http.conftest import site as site  # a fixture
from tests.support import tiny
from tests.support.daemon import wait_until

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def sdk(site):
    client = openai.OpenAI(
        base_url=f"{site.url}/v1",
        api_key="none is needed here",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )
    with client:
        yield client


class TestModels:
    """The SDK lists and retrieves models."""

    def test_list(self, sdk):
        assert {"thinker", "quick", "embed"} <= {model.id for model in sdk.models.list()}

    def test_retrieve(self, sdk):
        model = sdk.models.retrieve("quick")
        assert (model.id, model.object, model.owned_by) == ("quick", "model", "llmux")

    def test_unknown(self, sdk):
        with pytest.raises(openai.NotFoundError, match="Did you mean 'quick'") as told:
            sdk.models.retrieve("quikc")
        assert told.value.code == "model_not_found"
        assert told.value.request_id is not None


class TestGivenUp:
    """What only a person can mend is raised at once: with `Retry-After: 60` the SDK would wait for minutes."""

    def test_one_request(self, site):
        site.chat("broken")
        site.wait_state("broken", "failed")
        asked: list[str] = []
        hooks = {"request": [lambda request: asked.append(request.url.path)]}
        http = openai.DefaultHttpxClient(trust_env=False, event_hooks=hooks)
        with (
            openai.OpenAI(base_url=f"{site.url}/v1", api_key="x", max_retries=2, http_client=http) as client,
            pytest.raises(openai.InternalServerError, match="broken does not start"),
        ):
            client.chat.completions.create(model="broken", messages=HELLO)
        assert asked == ["/v1/chat/completions"]


class TestChat:
    """Chat completions: whole, streamed, with tools, with and without thoughts."""

    def test_whole(self, sdk):
        message = sdk.chat.completions.create(model="thinker", messages=HELLO).choices[0].message
        assert message.content == tiny.ANSWER
        assert message.reasoning_content.strip() == tiny.THOUGHT

    def test_streamed_with_usage(self, sdk):
        stream = sdk.chat.completions.create(
            model="quick", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == tiny.ANSWER
        assert chunks[-1].usage.completion_tokens > 0
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]

    def test_no_thoughts_where_the_virtual_model_turns_them_off(self, sdk):
        whole = sdk.chat.completions.create(model="quick", messages=HELLO).choices[0].message
        assert whole.content == tiny.ANSWER
        assert "reasoning_content" not in whole.model_dump()
        stream = sdk.chat.completions.create(model="quick", messages=HELLO, stream=True)
        deltas = [chunk.choices[0].delta.model_dump() for chunk in stream if chunk.choices]
        assert not any(delta.get("reasoning_content") for delta in deltas)

    def test_the_virtual_model_overrules_the_client(self, sdk):
        wish = {"chat_template_kwargs": {"enable_thinking": True}}
        message = sdk.chat.completions.create(model="quick", messages=HELLO, extra_body=wish).choices[0].message
        assert "reasoning_content" not in message.model_dump()

    @pytest.mark.parametrize("stream", [False, True])
    def test_tool_call(self, sdk, stream):
        answer = sdk.chat.completions.create(model="thinker", messages=HELLO, tools=[WEATHER], stream=stream)
        if stream:
            deltas = [chunk.choices[0].delta for chunk in answer if chunk.choices]
            calls = [call.function for delta in deltas for call in delta.tool_calls or []]
            name, arguments = calls[0].name, "".join(call.arguments or "" for call in calls)
        else:
            assert answer.choices[0].finish_reason == "tool_calls"
            (call,) = answer.choices[0].message.tool_calls
            name, arguments = call.function.name, call.function.arguments
        assert {"name": name, "arguments": json.loads(arguments)} == tiny.TOOL_CALL

    def test_headers(self, sdk):
        raw = sdk.chat.completions.with_raw_response.create(model="quick", messages=HELLO)
        assert raw.request_id == raw.headers["x-request-id"]
        assert raw.headers["openai-processing-ms"].isdecimal()


class TestBatches:
    """Files and batches, as the SDK's own documentation uses them."""

    def test_from_the_file_to_the_answers(self, sdk, tmp_path):
        lines = [
            {
                "custom_id": f"request-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "quick" if number else "broken", "messages": HELLO},
            }
            for number in range(5)
        ]
        (path := tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
        with path.open("rb") as opened:
            file = sdk.files.create(file=opened, purpose="batch")
        assert (file.filename, file.bytes, file.purpose) == (path.name, path.stat().st_size, "batch")
        batch = sdk.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"night": "monday"},
        )
        wait_until(lambda: sdk.batches.retrieve(batch.id).status == "completed")
        batch = sdk.batches.retrieve(batch.id)
        assert batch.metadata == {"night": "monday"}
        assert batch.request_counts.to_dict() == {"total": 5, "completed": 4, "failed": 1}
        answers = {each["custom_id"]: each for each in map(json.loads, self.lines(sdk, batch.output_file_id))}
        assert {*answers} == {f"request-{number}" for number in range(1, 5)}
        assert {each["response"]["body"]["choices"][0]["message"]["content"] for each in answers.values()} == {
            tiny.ANSWER
        }
        [error] = map(json.loads, self.lines(sdk, batch.error_file_id))
        assert (error["custom_id"], error["response"]["body"]["error"]["code"]) == ("request-0", "model_failed")
        assert {batch.output_file_id, batch.error_file_id} <= {each.id for each in sdk.files.list()}
        assert sdk.files.retrieve(batch.output_file_id).purpose == "batch_output"
        assert sdk.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            sdk.files.retrieve(file.id)

    def lines(self, sdk, file_id):
        return sdk.files.content(file_id).text.splitlines()

    def test_listed_page_by_page(self, sdk):
        file = sdk.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        asked = {"input_file_id": file.id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
        made = [sdk.batches.create(**asked).id for _ in range(3)]
        assert [each.id for each in sdk.batches.list(limit=2)][:3] == made[::-1]
        wait_until(lambda: sdk.batches.retrieve(made[0]).status == "failed")
        [error] = sdk.batches.retrieve(made[0]).errors.data
        assert (error.line, error.code, error.param) == (1, "invalid_custom_id", "custom_id")

    def test_cancel(self, sdk):
        line = {"method": "POST", "url": "/v1/embeddings", "body": {"model": "embed", "input": "a"}}
        lines = "\n".join(json.dumps({"custom_id": f"{number}", **line}) for number in range(5000))
        file = sdk.files.create(file=("a.jsonl", lines.encode()), purpose="batch")
        batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        assert sdk.batches.cancel(batch.id).status == "cancelling"
        wait_until(lambda: sdk.batches.retrieve(batch.id).status == "cancelled")

    def test_no_such_endpoint(self, sdk):
        file = sdk.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="endpoint must be one of /v1/chat/completions") as told:
            sdk.batches.create(input_file_id=file.id, endpoint="/v1/moderations", completion_window="24h")
        assert (told.value.type, told.value.param) == ("invalid_request_error", "endpoint")


class TestOtherOperations:
    """Embeddings, completions and responses through the SDK."""

    def test_embeddings(self, sdk):
        # the SDK asks for base64 when nothing is asked for
        packed = sdk.embeddings.create(model="embed", input=["one", "two"]).data
        floats = sdk.embeddings.create(model="embed", input=["one", "two"], encoding_format="float").data
        assert [row.index for row in packed] == [0, 1]
        assert [pytest.approx(row.embedding) for row in packed] == [row.embedding for row in floats]
        assert packed[0].embedding != packed[1].embedding

    def test_embeddings_of_tokens(self, sdk):
        assert len(sdk.embeddings.create(model="embed", input=[[1, 2, 3]]).data[0].embedding) == 256

    def test_completions(self, sdk):
        assert "Hello" in sdk.completions.create(model="quick", prompt="Say", max_tokens=8).choices[0].text

    def test_responses(self, sdk):
        assert sdk.responses.create(model="quick", input="Hello").output_text == tiny.ANSWER

    def test_responses_streamed(self, sdk):
        events = list(sdk.responses.create(model="quick", input="Hello", stream=True))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == tiny.ANSWER
        assert events[-1].type == "response.completed"

    @pytest.mark.parametrize("tools", [[], [{"type": "function", **WEATHER["function"]}]], ids=["text", "tools"])
    def test_responses_through_the_sdks_own_stream(self, sdk, tools):
        """It puts the response together by the events' places, which llama.cpp leaves out."""
        model = "thinker" if tools else "quick"
        with sdk.responses.stream(model=model, input="Hello", tools=tools) as stream:
            numbers = [event.sequence_number for event in stream]
            response = stream.get_final_response()
        assert numbers == list(range(len(numbers)))
        assert response.model == model
        if tools:
            (call,) = (item for item in response.output if item.type == "function_call")
            assert {"name": call.name, "arguments": json.loads(call.arguments)} == tiny.TOOL_CALL
        else:
            assert response.output_text == tiny.ANSWER

    def test_a_prompt_that_is_too_long(self, sdk):
        with pytest.raises(openai.BadRequestError) as told:
            sdk.chat.completions.create(model="quick", messages=[{"role": "user", "content": "Hello " * 9000}])
        assert told.value.code == "context_length_exceeded"


class TestOtherDialects:
    """What llama.cpp serves beyond OpenAI's paths is there under its own paths."""

    def test_messages(self, site):
        body = {"model": "quick", "max_tokens": 50, "messages": HELLO}
        answer = site.post("/v1/messages", json=body, headers={"x-api-key": "any", "anthropic-version": "2023-06-01"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["content"] == [{"type": "text", "text": tiny.ANSWER}]

    def test_messages_streamed(self, site):
        body = {"model": "quick", "max_tokens": 50, "messages": HELLO, "stream": True}
        answer = site.post("/v1/messages", json=body)
        assert answer.headers["x-accel-buffering"] == "no"
        assert "event: message_stop" in answer.text

    def test_count_tokens_counts_what_is_run(self, site):
        body = {"model": "quick", "max_tokens": 5, "messages": HELLO}
        counted = site.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
        usage = site.chat("quick").json()["usage"]
        assert usage["prompt_tokens"] == counted

    @pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v1/reranking", "/v2/rerank"])
    def test_rerank(self, site, path):
        body = {"model": "rank", "query": "a", "documents": ["a", "b"], "top_n": 2, "max_tokens_per_doc": 4096}
        results = site.post(path, json=body).json()["results"]
        assert {0, 1} == {row["index"] for row in results}
        assert all(isinstance(row["relevance_score"], float) for row in results)

    def test_tokenize_and_back(self, site):
        tokens = site.post("/tokenize", json={"model": "chat", "content": "Hello"}).json()["tokens"]
        assert site.post("/detokenize", json={"model": "chat", "tokens": tokens}).json()["content"] == "Hello"

    def test_a_get_names_its_model_in_the_query(self, site):
        assert site.get("/props", params={"model": "quick"}).json()["model_alias"] == "chat"
        assert len(site.get("/slots?model=chat").json()) == 4
        told = site.get("/slots")
        assert told.status_code == 400
        assert "/slots?model=NAME" in told.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "suffix"),
            ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
            ("/detokenize", {"tokens": [-5]}, "tokens"),
        ],
    )
    def test_a_mistake_that_the_worker_blames_itself_for(self, site, path, body, param):
        told = site.post(path, json={"model": "chat", **body})
        assert (told.status_code, told.json()["error"]["param"]) == (400, param)


class TestMistakes:
    """What a client sends wrongly is a 400 with a reason, never a 500."""

    PICTURE = "data:image/png;base64,AAAA"

    @pytest.mark.parametrize(
        ("path", "fields"),
        [
            ("chat/completions", {"messages": [{"content": "x"}]}),
            ("chat/completions", {"messages": [{"role": 3, "content": "x"}]}),
            ("chat/completions", {"messages": "Hello"}),
            ("chat/completions", {"messages": [*HELLO, {"role": "assistant", "tool_calls": "x"}]}),
            ("chat/completions", {"messages": HELLO, "tools": "x"}),
            ("chat/completions", {"messages": HELLO, "tools": [{"type": "custom", "custom": {"name": "f"}}]}),
            ("chat/completions", {"messages": HELLO, "tools": [{"type": "function", "function": {"parameters": {}}}]}),
            (
                "chat/completions",
                {"messages": HELLO, "tools": [WEATHER | {"function": {"name": "f", "parameters": "x"}}]},
            ),
            ("chat/completions", {"messages": HELLO, "tools": [{"type": "web_search"}]}),
            ("responses", {"input": 3}),
            ("responses", {"input": "x", "tools": [{"type": "function", "parameters": {}}]}),
            (
                "responses",
                {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}]},
            ),
            ("messages", {"max_tokens": 5}),
            ("messages/count_tokens", {}),
            ("embeddings", {"model": "embed", "input": {}}),
            ("rerank", {"model": "rank", "query": "a", "documents": "b"}),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_is_said(self, site, path, fields, stream):
        told = site.post(f"/v1/{path}", json={"model": "quick", "stream": stream, **fields})
        assert told.status_code == 400, told.text
        error = told.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert 0 < len(error["message"]) < 500

    def test_what_the_worker_takes_it_gets(self, site):
        tools = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]  # Codex offers them always
        told = site.post("/v1/responses", json={"model": "quick", "input": "x", "tools": tools, "max_output_tokens": 5})
        assert told.status_code == 200
