"""llama.cpp's requests share their worker's context: each has its turn, and none fails because of the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.daemon import gguf, running, wait_until

CONTEXT = 4096


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    config = {"models": {"chat": gguf(n_ctx=CONTEXT, parallel=4)}}
    with running(tmp_path_factory.mktemp("shared"), config) as daemon:
        yield daemon


def ask(site, text, **fields):
    messages = [{"role": "user", "content": text}]
    return site.post("/v1/chat/completions", json={"model": "chat", "messages": messages, **fields})


def together(site, texts, **fields):
    with ThreadPoolExecutor(len(texts)) as pool:
        return [*pool.map(lambda text: ask(site, text, **fields), texts)]


def test_long_prompts_wait_for_each_other(site):
    told = together(site, [f"{number} " + "word " * 1300 for number in range(4)])
    assert [each.status_code for each in told] == [200] * 4, [each.text for each in told]
    assert max(int(each.headers["x-queue-wait-ms"]) for each in told) > 0


def test_what_clients_allow_an_answer_keeps_nobody_waiting(site):
    """Agents ask for up to 32000 tokens, and use few of them."""
    ask(site, "Hello")
    told = together(site, ["Hello"] * 4, max_tokens=32000)
    assert [each.status_code for each in told] == [200] * 4
    mine = {each.headers["x-request-id"] for each in told}

    def ended():
        return [row for row in site.get("/v1/admin/requests/ended").json()["data"] if row["request_id"] in mine]

    rows = wait_until(lambda: found if len(found := ended()) == 4 else None)
    assert "place" not in {part["kind"] for row in rows for part in row["wait"]}


def test_more_tokens_than_expected(site):
    """Each of these letters is several tokens: the worker refuses those that it can't have at once, and gets them one by one."""
    letters = "\u0f00\u0f12\u0f40\u0fd4" * 120
    told = together(site, [f"{number}{letters}" for number in range(4)], max_tokens=8)
    assert [each.status_code for each in told] == [200] * 4, [each.text for each in told]


def test_one_that_is_too_long_is_told_so(site):
    told = ask(site, "word " * 2 * CONTEXT)
    assert (told.status_code, told.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_the_context_of_one_request(site):
    """All of it: one that is alone may have that."""
    assert site.get("/v1/models/chat").json()["context_length"] == CONTEXT
