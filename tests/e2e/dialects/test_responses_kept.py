"""Responses that are kept, and generated in the background: OpenAI's client, with workers of both kinds.

`speaks` answers Responses itself, the others only chat: `llama` is a real model, the others are scripted.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.daemon import Daemon, fake, gguf, llama_command, running, wait_until
from tests.support.fake_worker import WORDS
from tests.support.tiny import ANSWER

CHAT = "/v1/chat/completions"
EXTENSION_FIELDS = "".join(WORDS)
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CALL = [
    {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Rome"}'}}]},
]


def config(folder, **more):
    models = {
        "llama": gguf(vram_mib=200),
        "speaks": llama_command(),
        "chat": fake(endpoints=[CHAT]),
        "wait": fake("--hang-while", str(folder / "hang"), endpoints=[CHAT]),
        "endless": fake("--goes-on-until", str(folder / "done"), endpoints=[CHAT]),
        "broken": fake("--status", "500", endpoints=[CHAT]),
        "dying": fake("--die-after=2", endpoints=[CHAT]),
    }
    forced = {
        "calling": {"deltas": CALL, "finish": "tool_calls"},
        "thinking": {"message": {"reasoning_content": "Hm", "content": "Hello"}},
    }
    virtual = {name: {"model": "chat", "force": {"fake": keys}} for name, keys in forced.items()}
    virtual["short"] = {"model": "llama", "defaults": {"max_tokens": 1}}
    return {"models": models, "virtual_models": virtual, **more}


def sdk_of(site: Daemon, key: str = "none is needed here") -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=0, http_client=http)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("kept")
    with running(folder, config(folder)) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def sdk(site) -> Iterator[openai.OpenAI]:
    with sdk_of(site) as client:
        yield client


def over(sdk: openai.OpenAI, name: str):
    return wait_until(lambda: (found := sdk.responses.retrieve(name)).status not in {"queued", "in_progress"} and found)


def texts(items) -> list[tuple[str, str]]:
    return [(item.role, item.content[0].text) for item in items if item.type == "message"]


def test_a_model_that_never_comes_is_an_event_for_the_sdk(tmp_path):
    """Its `stream()` takes nothing before `response.created`."""
    models = {"never": fake("--start-delay=1", "--exit-code=1", endpoints=[CHAT])}
    limits = {"keepalive_s": 0.1, "crash_limit": 1}
    with running(tmp_path, {"models": models, "limits": limits}) as site, sdk_of(site) as sdk:
        with sdk.responses.stream(model="never", input="Hi") as stream:
            kinds = [event.type for event in stream]
        assert kinds == ["response.created", "error"]


class TestFields:
    """Each has its effect on a real model, or is refused or told."""

    def ask(self, sdk, given="Hi", **fields):
        return sdk.responses.create(model="llama", input=given, store=False, **fields)

    def test_an_answer_that_is_cut_short(self, sdk):
        told = self.ask(sdk, max_output_tokens=1)
        assert (told.status, told.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        *_, last = self.ask(sdk, max_output_tokens=1, stream=True)
        assert last.type == "response.incomplete"

    def test_an_answer_that_the_configuration_cuts_short(self, sdk):
        assert sdk.responses.create(model="short", input="Hi").status == "incomplete"
        assert sdk.responses.create(model="short", input="Hi", max_output_tokens=200).status == "completed"

    def test_what_the_assistant_said(self, sdk):
        given = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]
        assert self.ask(sdk, given).output_text == ANSWER
        counted = sdk.responses.input_tokens.count(model="llama", input=given)
        assert counted.input_tokens > sdk.responses.input_tokens.count(model="llama", input="Hi").input_tokens

    def test_less_thinking(self, sdk):
        told = [self.ask(sdk, reasoning={"effort": effort}).output for effort in ("minimal", "high")]
        assert [[item.type for item in output] for output in told] == [["message"], ["reasoning", "message"]]

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"conversation": "conv_1"}, "conversation"),
            ({"prompt": {"id": "pmpt_1"}}, "prompt"),
            ({"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, "tools[0]"),
            ({"given": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ],
    )
    def test_what_nobody_can_do(self, sdk, fields, param):
        with pytest.raises(openai.BadRequestError) as refused:
            self.ask(sdk, **fields)
        assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")

    def test_thoughts_that_only_others_can_read(self, sdk):
        thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "theirs"}
        assert self.ask(sdk, [thought, {"role": "user", "content": "Hi"}]).output_text == ANSWER

    def test_metadata_come_back(self, sdk):
        assert self.ask(sdk, metadata={"a": "b"}).metadata == {"a": "b"}

    @pytest.mark.parametrize(
        ("fields", "ignored"),
        [
            ({"text": {"verbosity": "low"}}, "text.verbosity"),
            ({"include": ["reasoning.encrypted_content"]}, "include[reasoning.encrypted_content]"),
            ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
            ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
            ({"service_tier": "flex"}, "service_tier"),
            ({"max_tool_calls": 1}, "max_tool_calls"),
            ({"prompt_cache_key": "k"}, "prompt_cache_key"),
            ({"safety_identifier": "s"}, "safety_identifier"),
        ],
    )
    def test_what_has_no_effect_is_named(self, sdk, fields, ignored):
        told = sdk.responses.with_raw_response.create(model="llama", input="Hi", **fields)
        assert told.headers["x-llmux-ignored"] == ignored

    @pytest.mark.parametrize("store", [True, False])
    def test_thoughts_have_all_their_events_before_the_texts(self, sdk, store):
        told = sdk.responses.create(model="llama", input="Hi", store=store, stream=True)
        found = [(event.type.removeprefix("response."), getattr(event, "output_index", None)) for event in told]
        events = [
            "output_item.added",
            "content_part.added",
            "{}.delta",
            "{}.done",
            "content_part.done",
            "output_item.done",
        ]
        items = [
            (kind.format(text), at) for at, text in enumerate(["reasoning_text", "output_text"]) for kind in events
        ]
        assert [*dict.fromkeys(found)] == [("created", None), ("in_progress", None), *items, ("completed", None)]

    def test_null_is_nothing(self, site):
        nulls = dict.fromkeys(["max_output_tokens", "conversation", "prompt", "top_logprobs"])
        told = site.post("/v1/responses", json={"model": "llama", "input": "Hi", "store": False, **nulls})
        assert (told.status_code, told.headers.get("x-llmux-ignored")) == (200, None)


class TestConversation:
    """A response goes on from an earlier one."""

    @pytest.mark.parametrize(("model", "said"), [("llama", ANSWER), ("speaks", ANSWER), ("chat", EXTENSION_FIELDS)])
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_chain(self, sdk, model, said, stream):
        def ask(text, **fields):
            if not stream:
                return sdk.responses.create(model=model, input=text, **fields)
            return [*sdk.responses.create(model=model, input=text, stream=True, **fields)][-1].response

        first = ask("One", instructions="Be brief.")
        second = ask("Two", previous_response_id=first.id)
        third = ask([{"role": "user", "content": "Three"}], previous_response_id=second.id, store=True)
        assert (second.previous_response_id, third.previous_response_id, third.store) == (first.id, second.id, True)
        listed = sdk.responses.input_items.list(third.id, order="asc")
        assert texts(listed) == [
            ("user", "One"),
            ("assistant", said),
            ("user", "Two"),
            ("assistant", said),
            ("user", "Three"),
        ]
        assert model == "chat" or third.usage.input_tokens > second.usage.input_tokens > 0, "the worker got all of it"

    def test_instructions_hold_for_one_response(self, sdk):
        """The prompt's tokens are the same as if the earlier one had had none."""
        brief, plain = (
            sdk.responses.create(model="llama", input="One", instructions=text) for text in ("Be brief.", None)
        )
        assert brief.usage.input_tokens > plain.usage.input_tokens
        after = [
            sdk.responses.create(model="llama", input="Two", previous_response_id=each.id).usage.input_tokens
            for each in (brief, plain)
        ]
        assert after[0] == after[1]

    def test_its_tokens_are_counted(self, sdk):
        first = sdk.responses.create(model="llama", input="One")
        count = sdk.responses.input_tokens.count
        alone, after = (count(model="llama", input="Two", previous_response_id=name) for name in (None, first.id))
        assert after.input_tokens > alone.input_tokens > 0

    def test_one_that_is_not_kept_itself(self, sdk):
        first = sdk.responses.create(model="chat", input="One")
        second = sdk.responses.create(model="chat", input="Two", previous_response_id=first.id, store=False)
        assert (second.store, second.previous_response_id) == (False, first.id)
        with pytest.raises(openai.NotFoundError):
            sdk.responses.retrieve(second.id)

    def test_a_call_and_its_result(self, sdk):
        first = sdk.responses.create(model="calling", input="Weather?", tools=[TOOL], stream=True)
        last = [*first][-1].response
        call = last.output[0]
        assert call.type == "function_call"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        second = sdk.responses.create(model="chat", input=[result], previous_response_id=last.id, tools=[TOOL])
        items = [*sdk.responses.input_items.list(second.id, order="asc")]
        assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
        assert (items[1].arguments, items[2].output, items[1].id) == ('{"city": "Rome"}', "sunny", call.id)

    def test_thoughts_are_part_of_it(self, sdk):
        first = sdk.responses.create(model="thinking", input="One")
        second = sdk.responses.create(model="llama", input="Two", previous_response_id=first.id)
        assert [item.type for item in sdk.responses.input_items.list(second.id, order="asc")] == [
            "message",
            "reasoning",
            "message",
            "message",
        ]

    @pytest.mark.parametrize("model", ["llama", "speaks", "chat"])
    def test_an_unknown_one(self, sdk, model):
        with pytest.raises(openai.BadRequestError) as told:
            sdk.responses.create(model=model, input="Two", previous_response_id="resp_0")
        assert (told.value.code, told.value.param) == ("previous_response_not_found", "previous_response_id")
        assert told.value.body["message"] == "Previous response with id 'resp_0' not found."

    @pytest.mark.parametrize(("field", "value"), [("conversation", "conv_1"), ("prompt", {"id": "pmpt_1"})])
    def test_what_is_not_kept_is_refused_by_name(self, sdk, field, value):
        with pytest.raises(openai.BadRequestError) as told:
            sdk.responses.create(model="chat", input="Hi", **{field: value})
        assert (told.value.param, told.value.code) == (field, "unsupported_parameter")

    def test_a_picture_comes_along(self, sdk):
        picture = "data:image/png;base64," + "A" * 400_000
        parts = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": picture}]
        first = sdk.responses.create(model="chat", input=[{"role": "user", "content": parts}])
        second = sdk.responses.create(model="chat", input="And now?", previous_response_id=first.id)
        shown = "message.input_image.image_url"
        whole = [*sdk.responses.input_items.list(second.id, order="asc", include=[shown])]
        bare = [*sdk.responses.input_items.list(second.id, order="asc")]
        assert whole[0].content[1].image_url == picture
        assert bare[0].content[1].image_url is None
        assert whole[0].id == bare[0].id


class TestKept:
    """What can be done with one."""

    @pytest.mark.parametrize("model", ["llama", "speaks", "chat"])
    def test_it_is_found_and_deleted(self, sdk, model):
        made = sdk.responses.create(model=model, input="Hi", metadata={"a": "b"})
        found = sdk.responses.retrieve(made.id)
        assert found.model_dump() == made.model_dump()
        deleted = sdk.responses.with_raw_response.delete(made.id)
        assert deleted.http_response.json() == {"id": made.id, "object": "response", "deleted": True}
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{made.id}' not found"):
            sdk.responses.retrieve(made.id)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("model", ["llama", "speaks", "chat"])
    def test_not_without_store(self, sdk, model, stream):
        made = sdk.responses.create(model=model, input="Hi", store=False, stream=stream)
        made = [*made][-1].response if stream else made
        with pytest.raises(openai.NotFoundError):
            sdk.responses.retrieve(made.id)

    def test_a_worker_that_speaks_it_is_passed_through(self, site):
        """What it says of itself stays, unless the request has something to tell."""
        body = {"model": "speaks", "input": "Hi"}
        theirs = site.post("/v1/responses", json=body | {"store": False}).json()
        plain = site.post("/v1/responses", json=body).json()
        told = site.post("/v1/responses", json=body | {"store": True}).json()
        assert {*plain} - {*theirs} == {"metrics"}
        assert {*told} - {*plain} == {"store", "background", "previous_response_id"}

    def test_pages_of_its_input(self, sdk, site):
        given = [{"role": "user", "content": f"{number}"} for number in range(5)]
        made = sdk.responses.create(model="chat", input=given)
        assert [text for _, text in texts(sdk.responses.input_items.list(made.id))] == ["4", "3", "2", "1", "0"]
        url = f"/v1/responses/{made.id}/input_items"
        page = site.get(url, params={"limit": 2, "order": "asc"}).json()
        ids = [item["id"] for item in page["data"]]
        assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", *ids, True)
        rest = site.get(url, params={"after": ids[1], "order": "asc"}).json()
        assert (len(rest["data"]), rest["has_more"]) == (3, False)
        assert site.get(url, params={"before": ids[1], "order": "asc"}).json()["data"] == page["data"][:1]
        paged = [*sdk.responses.input_items.list(made.id, limit=2)]
        assert [text for _, text in texts(paged)] == ["4", "3", "2", "1", "0"]

    @pytest.mark.parametrize(
        "params", [{"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "no"}, {"include": "all"}]
    )
    def test_a_wrong_page(self, sdk, site, params):
        made = sdk.responses.create(model="chat", input="Hi")
        told = site.get(f"/v1/responses/{made.id}/input_items", params=params)
        assert (told.status_code, told.json()["error"]["param"]) == (400, next(iter(params)))

    def test_what_can_only_be_done_in_the_background(self, sdk):
        made = sdk.responses.create(model="chat", input="Hi")
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            sdk.responses.cancel(made.id)
        with pytest.raises(openai.BadRequestError):
            sdk.responses.retrieve(made.id, stream=True)

    def test_llm_pools_are_not_kept(self, site):
        body = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}]}
        made = site.post("/v1/responses", json=body).json()
        assert site.get(f"/v1/responses/{made['id']}").status_code == 404


class TestBackground:
    """Nobody waits for it."""

    @pytest.mark.parametrize(("model", "said"), [("llama", ANSWER), ("speaks", ANSWER), ("chat", EXTENSION_FIELDS)])
    def test_polled(self, sdk, model, said):
        first = sdk.responses.create(model=model, input="One")
        made = sdk.responses.create(model=model, input="Two", previous_response_id=first.id, background=True)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        found = over(sdk, made.id)
        assert (found.status, found.output_text, found.id, found.created_at) == (
            "completed",
            said,
            made.id,
            made.created_at,
        )
        assert (found.background, found.store, found.previous_response_id) == (True, True, first.id)
        third = sdk.responses.create(model=model, input="Three", previous_response_id=made.id)
        assert [text for _, text in texts(sdk.responses.input_items.list(third.id, order="asc"))] == [
            "One",
            said,
            "Two",
            said,
            "Three",
        ]

    @pytest.mark.parametrize(("model", "said"), [("llama", ANSWER), ("speaks", ANSWER), ("chat", EXTENSION_FIELDS)])
    def test_streamed_and_streamed_again(self, sdk, model, said):
        events = [*sdk.responses.create(model=model, input="Hi", background=True, stream=True)]
        assert [event.sequence_number for event in events] == [*range(len(events))]
        assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
        assert (events[0].response.status, events[-1].type) == ("queued", "response.completed")
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == said
        name = events[0].response.id
        assert {event.response.id for event in events if hasattr(event, "response")} == {name}
        again = [*sdk.responses.retrieve(name, stream=True, starting_after=3)]
        assert [event.model_dump() for event in again] == [event.model_dump() for event in events[4:]]
        assert sdk.responses.retrieve(name).output_text == said

    def test_a_client_that_left_comes_back(self, sdk, site):
        (done := site.folder / "done").unlink(missing_ok=True)
        stream = sdk.responses.create(model="endless", input="Hi", background=True, stream=True)
        seen = [next(stream) for _ in range(6)]
        stream.close()
        name = seen[0].response.id
        assert sdk.responses.retrieve(name).status == "in_progress"
        again = sdk.responses.retrieve(name, stream=True, starting_after=5)
        assert next(again).sequence_number == 6
        done.touch()
        rest = [*again]
        assert [event.sequence_number for event in rest] == [*range(7, 7 + len(rest))]
        assert rest[-1].type == "response.completed"

    def test_cancelled(self, sdk, site):
        (hang := site.folder / "hang").touch()
        made = sdk.responses.create(model="wait", input="Hi", background=True)
        wait_until(lambda: sdk.responses.retrieve(made.id).status == "in_progress")
        with pytest.raises(openai.BadRequestError, match="not completed"):
            sdk.responses.create(model="chat", input="Two", previous_response_id=made.id)
        assert sdk.responses.cancel(made.id).status == "cancelled"
        assert sdk.responses.cancel(made.id).status == "cancelled"
        assert sdk.responses.retrieve(made.id).status == "cancelled"
        wait_until(lambda: not site.get("/v1/admin/requests").json()["data"])
        hang.unlink()
        done = sdk.responses.create(model="chat", input="Hi", background=True)
        over(sdk, done.id)
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a completed response"):
            sdk.responses.cancel(done.id)
        assert not site.get("/v1/jobs").json()["data"], "nothing is left of what is over"

    def test_a_stream_that_is_cancelled_says_so_at_its_end(self, sdk, site):
        (done := site.folder / "done").unlink(missing_ok=True)
        stream = sdk.responses.create(model="endless", input="Hi", background=True, stream=True)
        begun = next(stream).response
        said = next(event for event in stream if event.type == "response.output_text.delta")
        assert sdk.responses.cancel(begun.id).status == "cancelled"
        *_, before, last = said, *stream
        assert (last.type, last.response.status, last.response.error) == ("response.failed", "cancelled", None)
        assert (last.response.id, last.sequence_number) == (begun.id, before.sequence_number + 1)
        (again,) = sdk.responses.retrieve(begun.id, stream=True, starting_after=before.sequence_number)
        assert again.model_dump() == last.model_dump()
        assert sdk.responses.retrieve(begun.id).model_dump() == last.response.model_dump()
        done.touch()

    def test_deleted_while_it_runs(self, sdk, site):
        (hang := site.folder / "hang").touch()
        made = sdk.responses.create(model="wait", input="Hi", background=True)
        sdk.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            sdk.responses.retrieve(made.id)
        wait_until(lambda: not site.get("/v1/admin/requests").json()["data"])
        hang.unlink()

    @pytest.mark.parametrize(("model", "message"), [("broken", "as told"), ("dying", "")])
    @pytest.mark.parametrize("stream", [False, True])
    def test_failed(self, sdk, model, message, stream):
        made = sdk.responses.create(model=model, input="Hi", background=True, stream=stream)
        if stream:
            last = [*made][-1]
            assert last.type == "response.failed"
            made = last.response
        found = over(sdk, made.id)
        assert found.status == ("completed" if model == "dying" and not stream else "failed")
        assert found.status == "completed" or message in found.error.message

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"store": False}, "store"),
            ({"previous_response_id": "resp_0"}, "previous_response_id"),
            ({"model": "nobody"}, "model"),
            ({"input": None}, "input"),
            ({"tools": [{"type": "file_search"}]}, "tools[0]"),
        ],
    )
    def test_what_can_be_seen_to_fail_is_refused_at_once(self, site, fields, param):
        body = {"model": "chat", "input": "Hi", "background": True, **fields}
        told = site.post("/v1/responses", json=body)
        assert (told.json()["error"]["param"], told.status_code // 100) == (param, 4)

    def test_no_job_asks_for_it(self, site):
        body = {"model": "chat", "input": "Hi", "background": True}
        told = site.post("/v1/jobs", json={"endpoint": "/v1/responses", "body": body})
        assert (told.status_code, told.json()["error"]["param"]) == (400, "body")


class TestRestart:
    @pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
    def test_what_is_kept_stays_and_what_ran_is_run_again(self, tmp_path, how):
        (tmp_path / "hang").touch()
        with running(tmp_path, config(tmp_path, limits={"drain_s": 0})) as site, sdk_of(site) as sdk:
            first = sdk.responses.create(model="chat", input="One")
            waits = sdk.responses.create(model="wait", input="Two", previous_response_id=first.id, background=True)
            wait_until(lambda: sdk.responses.retrieve(waits.id).status == "in_progress")
            wait_until(lambda: list((site.state_dir / "responses").glob(f"{first.id}.json")))
            assert site.process is not None
            site.process.send_signal(how)
            site.process.wait(60)
            (tmp_path / "hang").unlink()
            site.start()
            assert sdk.responses.retrieve(first.id).output_text == EXTENSION_FIELDS
            assert over(sdk, waits.id).output_text == EXTENSION_FIELDS
            assert len([*sdk.responses.input_items.list(waits.id)]) == 3


class TestBounds:
    def test_the_oldest_go(self, tmp_path):
        with running(tmp_path, config(tmp_path, limits={"responses_most": 2})) as site, sdk_of(site) as sdk:
            made = [sdk.responses.create(model="chat", input="Hi").id for _ in range(3)]
            wait_until(lambda: {path.stem for path in (site.state_dir / "responses").iterdir()} == {*made[1:]})
            assert [site.get(f"/v1/responses/{name}").status_code for name in made] == [404, 200, 200]

    def test_not_longer_than_configured(self, tmp_path):
        with running(tmp_path, config(tmp_path, limits={"responses_keep_s": 1})) as site, sdk_of(site) as sdk:
            made = sdk.responses.create(model="chat", input="Hi").id
            wait_until(lambda: site.get(f"/v1/responses/{made}").status_code == 404)

    def test_none_is_kept(self, tmp_path):
        with running(tmp_path, config(tmp_path, limits={"responses_mib": 0})) as site, sdk_of(site) as sdk:
            made = sdk.responses.create(model="chat", input="Hi")
            assert (made.store, site.get(f"/v1/responses/{made.id}").status_code) == (False, 404)
            for field in ({"previous_response_id": made.id}, {"background": True}):
                with pytest.raises(openai.BadRequestError, match="responses_mib"):
                    sdk.responses.create(model="chat", input="Hi", **field)


class TestTrouble:
    def test_a_disk_that_refuses(self, tmp_path):
        """What needs the disk says so; everything else is answered, and only not kept."""
        with running(tmp_path, config(tmp_path)) as site, sdk_of(site) as sdk:
            (site.state_dir / "responses").rename(tmp_path / "elsewhere")
            assert sdk.responses.create(model="chat", input="Hi").output_text == EXTENSION_FIELDS
            told = site.post("/v1/responses", json={"model": "chat", "input": "Hi", "background": True})
            assert (told.status_code, told.json()["error"]["code"]) == (507, "state_not_saved")
            assert not site.get("/v1/jobs").json()["data"]
            wait_until(lambda: site.events("response.not_kept"))


KEYS = {name: f"sk-secret-of-{name}-0123456789" for name in ("ann", "bob", "op")}


class TestWhose:
    def test_only_its_own_and_as_with_jobs_an_admins(self, tmp_path):
        scopes = {"ann": "inference", "bob": "inference", "op": "inference, admin"}
        lines = [f"- {{name: {name}, key: {key}, scopes: [{scopes[name]}]}}\n" for name, key in KEYS.items()]
        (tmp_path / "keys.yaml").write_text("".join(lines))
        keyed = config(tmp_path, server={"api_keys": str(tmp_path / "keys.yaml")})
        with running(tmp_path, keyed) as site:
            ann, bob, op = (sdk_of(site, key) for key in KEYS.values())
            for fields in ({}, {"background": True}):
                made = ann.responses.create(model="chat", input="Hi", **fields)
                over(ann, made.id)
                assert op.responses.retrieve(made.id).output_text == EXTENSION_FIELDS
                for forbidden in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel):
                    with pytest.raises(openai.NotFoundError):
                        forbidden(made.id)
                with pytest.raises(openai.NotFoundError):
                    [*bob.responses.input_items.list(made.id)]
                with pytest.raises(openai.BadRequestError) as told:
                    bob.responses.create(model="chat", input="Two", previous_response_id=made.id)
                assert told.value.code == "previous_response_not_found"
                assert (
                    ann.responses.create(model="chat", input="Two", previous_response_id=made.id).output_text
                    == EXTENSION_FIELDS
                )
            assert httpx.get(f"{site.url}/v1/responses/{made.id}", trust_env=False).status_code == 401
            for client in (ann, bob, op):
                client.close()


def test_names_are_no_paths(site):
    for name in ("%2e%2e", "resp_1.json", "resp_1%00", "x" * 300):
        told = site.get(f"/v1/responses/{name}")
        assert (told.status_code, json.loads(told.text)["error"]["type"]) == (404, "invalid_request_error")
