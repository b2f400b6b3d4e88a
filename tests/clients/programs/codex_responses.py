"""What Codex does: /v1/responses only, streamed, with a tool, not stored, the whole conversation sent each time."""

import json
import sys

import httpx

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Tell the weather.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is the weather?"}]}


def ask(conversation: list[dict]) -> list[dict]:
    """The events of one turn."""
    body = {
        "model": "quick",
        "instructions": "You are a coding agent.",
        "input": conversation,
        "tools": [TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a1b2",
    }
    headers = {"authorization": "Bearer any", "accept": "text/event-stream"}
    with httpx.stream(
        "POST", f"{sys.argv[1]}/v1/responses", json=body, headers=headers, trust_env=False, timeout=240
    ) as answer:
        lines = list(answer.iter_lines())
        assert answer.status_code == 200, lines
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


first = ask([asked])
(call,) = [
    event["item"]
    for event in first
    if event["type"] == "response.output_item.done" and event["item"]["type"] == "function_call"
]
result = {"type": "function_call_output", "call_id": call["call_id"], "output": "It is sunny."}
second = ask([asked, {key: call[key] for key in ("type", "call_id", "name", "arguments")}, result])
said = [event["text"] for event in second if event["type"] == "response.output_text.done"]

json.dump(
    {
        "called": [call["name"], json.loads(call["arguments"])],
        "said": said,
        "first_and_last": [[events[0]["type"], events[-1]["type"]] for events in (first, second)],
        "outputs": [events[0]["response"].get("output") for events in (first, second)],
    },
    sys.stdout,
)
