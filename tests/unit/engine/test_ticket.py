"""A request's client: told when it is cut, and asked how far it has read."""

from __future__ import annotations

import json
import math
import time

import pytest

from supervisor.core.admission.limits import Counted, Standing
from supervisor.core.effects import AskClients, QueueLoad, Reject
from supervisor.core.types import Generation, ModelId, RejectCode, TicketId
from supervisor.dialects.openai import OPENAI
from supervisor.engine.ticket import Ticket, blocking_reads, rejection
from supervisor.errors import UnavailableError
from supervisor.gateway.error_response import error_body, error_headers

A, B = ModelId("a"), ModelId("b")


class Client:
    def __init__(self, read=None):
        self.read = read
        self.errors = []

    def read_while_blocked(self):
        return self.read

    def interrupt(self, error):
        self.errors.append(error)


def ticket(name, client=None, model=A, generation=1):
    return Ticket(TicketId(name), model, 0.0, Generation(generation), client=client)


def test_a_cut_tells_the_client_why():
    client = Client()
    cut = ticket("1", client)
    cut.cut("drains for b")
    (error,) = client.errors
    assert isinstance(error, UnavailableError)
    assert (error.code, error.retry_after_s) == ("model_unloaded", 5.0)
    assert error.message == "The model was stopped before the answer was complete: drains for b."
    assert cut.cut_reason == "drains for b"


def test_a_cut_without_a_client():
    cut = ticket("1")
    cut.cut("drains for b")
    assert cut.cut_reason == "drains for b"


def test_only_this_workers_clients_that_hold_something_up():
    tickets = [
        ticket("slow", Client(100)),
        ticket("stopped", Client(0)),
        ticket("quick", Client()),
        ticket("queued", Client(1), generation=None),
        ticket("before", Client(2), generation=0),
        ticket("other", Client(3), model=B),
        ticket("nobody"),
    ]
    assert blocking_reads(tickets, AskClients(A, Generation(1))) == {"slow": 100, "stopped": 0}


class TestFigures:
    """What a program reads from a refusal, under the names that it knows from other runners."""

    def refused(self, code, about):
        error = rejection(Reject(TicketId("1"), code, "no", 3.0, about), "a")
        return error, json.loads(error_body(error, OPENAI))["error"]

    @pytest.mark.parametrize(("mean_s", "told"), [(None, None), (1.9996, 2000)])
    def test_a_full_queue(self, mean_s, told):
        error, body = self.refused(RejectCode.QUEUE_FULL, QueueLoad(16, mean_s))
        assert error.status == 503
        assert (body["code"], body["queueDepth"], body["avgWaitMs"]) == ("queue_full", 16, told)

    @pytest.mark.parametrize(
        ("standing", "in_s"),
        [
            (Standing("a", Counted.REQUESTS, 100, 60.0, 0, 0.6, 59.5), 59.5),
            (Standing("a", Counted.CONCURRENCY, 100, 0.0, 0, 1.0, 0.0), 1.0),
        ],
        ids=["a rate: all of it", "requests at once: the next try"],
    )
    def test_a_limit(self, standing, in_s, monkeypatch):
        monkeypatch.setattr(time, "time", lambda: 1000.0)
        error, body = self.refused(RejectCode.RATE_LIMIT_EXCEEDED, standing)
        assert (error.status, error.type) == (429, "rate_limit_error")
        assert (body["limit"], body["remaining"], body["resetAt"]) == (100, 0, 1000 + math.ceil(in_s))
        assert not error.lasts

    def test_a_wait_that_was_too_long(self):
        error, body = self.refused(RejectCode.QUEUE_TIMEOUT, None)
        assert (error.status, body["code"]) == (504, "queue_timeout")
        assert set(body) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("retry_after_s", "expected"),
    [
        (None, {b"x-should-retry": b"false"}),
        (30.0, {b"retry-after": b"30"}),
        (600.0, {b"retry-after": b"120", b"x-should-retry": b"false"}),
    ],
    ids=["never by itself", "soon", "in ten minutes"],
)
def test_a_rejection_says_whether_to_try_again(retry_after_s, expected):
    error = rejection(Reject(TicketId("1"), RejectCode.MODEL_FAILED, "no", retry_after_s), "a")
    headers = dict(error_headers(error, b""))
    assert {name: headers[name] for name in (b"retry-after", b"x-should-retry") if name in headers} == expected
