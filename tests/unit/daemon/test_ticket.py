"""A request's client: told when it is cut, and asked how far it has read."""

from __future__ import annotations

import pytest

from supervisor.core.effects import AskClients, Reject
from supervisor.core.types import Generation, ModelId, RejectCode, TicketId
from supervisor.daemon.ticket import Ticket, held_up, rejection
from supervisor.errors import UnavailableError
from supervisor.proxy.error_response import error_headers

A, B = ModelId("a"), ModelId("b")


class Client:
    def __init__(self, read=None):
        self.read = read
        self.errors = []

    def read_while_held_up(self):
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
    assert held_up(tickets, AskClients(A, Generation(1))) == {"slow": 100, "stopped": 0}


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
