"""The exllamav3 worker on a stand-in for its library: batches, cancellation, errors. tests/gpu has the real one."""

from __future__ import annotations

import threading

import httpx
import pytest

from tests.contract import conftest
from tests.support import tiny_language
from tests.support.daemon import wait_until
from tests.support.limits import LIMIT_S
from tests.support.tiny_language import ANSWER, THOUGHT


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exllamav3")
    subject = conftest.exllamav3(folder)
    with conftest.starting(folder) as start:
        yield start(subject, cache_size=4096, max_rq_tokens=512).wait_ready()


def chat(worker, text: str = "hi", **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return worker.post("/v1/chat/completions", body)


def running(worker) -> float:
    lines = worker.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("llmux_worker_running ")).split()[1])


def test_an_answer(worker):
    answer = chat(worker).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (ANSWER, THOUGHT)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 16, "the token that ended it counts"


def test_the_longest_answer_and_stop_strings(worker):
    assert chat(worker, max_tokens=3).json()["choices"][0]["finish_reason"] == "length"
    assert chat(worker, stop=" tiny").json()["choices"][0]["message"]["content"] == "Hello from a"


def test_several_at_once(worker):
    answers: list[str] = []
    ask = lambda: answers.append(chat(worker).json()["choices"][0]["message"]["content"])
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [ANSWER] * 4


def test_a_completion(worker):
    body = {"model": "m", "prompt": "assistant\n", "logit_bias": {"5": -100}, "max_tokens": 20}
    answer = worker.post("/v1/completions", body)
    assert "Hello from a" in answer.json()["choices"][0]["text"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"logprobs": True}, "logprobs"), ({"response_format": {"type": "json_object"}}, "response_format")],
)
def test_what_there_is_not_is_refused_by_name(worker, fields, param):
    answer = chat(worker, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_several_turns_are_refused(worker):
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    answer = worker.post("/v1/chat/completions", {"model": "m", "messages": turns})
    assert answer.json()["error"]["code"] == "multi_turn_unsupported"


def test_a_job_that_fails_fails_alone(worker):
    assert chat(worker, "please fail").json()["error"]["code"] == "worker_failed"
    assert chat(worker).status_code == 200


def test_a_prompt_too_long(worker):
    answer = chat(worker, "hi " * 5000)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "raise cache_size" in error["message"]


def test_memory_that_is_gone_is_told_and_the_worker_stays(worker):
    answer = chat(worker, "exhaust it")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")
    assert chat(worker).status_code == 200


def test_one_who_leaves_is_not_answered_any_longer(tmp_path):
    subject = conftest.exllamav3(tmp_path)
    with conftest.starting(tmp_path) as start:
        worker = start(subject, path=str(tiny_language.model(endless=True)), cache_size=4096).wait_ready()
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        url, headers = f"{worker.url}/v1/chat/completions", worker.headers()
        with httpx.stream("POST", url, json=body, headers=headers, timeout=LIMIT_S, trust_env=False) as answer:
            lines = answer.iter_lines()  # dropped, it would close the connection
            next(lines)
            assert running(worker) == 1
        wait_until(lambda: running(worker) == 0)
