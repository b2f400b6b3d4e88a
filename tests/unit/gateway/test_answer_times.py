"""How long answers took: of complete ones, by model and path, lately."""

from __future__ import annotations

import pytest

from supervisor.core.demand import AnswerTimes
from supervisor.core.types import ModelId, TicketId
from supervisor.dialects.openai import OPENAI
from supervisor.engine.ticket import Ticket
from supervisor.gateway.answer_times import FORGOTTEN_S, KEPT, AnswerLog
from supervisor.gateway.request import Request

M = ModelId("m")
CHAT = "/v1/chat/completions"


@pytest.fixture
def log():
    log = AnswerLog(lambda: log.now)
    log.now = 0.0
    return log


def answered(log, took_s, *, status=200, path=CHAT, failure=None, ticket=True):
    context = Request(b"id", log.now, OPENAI, path=path)
    context.attempt.ticket = Ticket(TicketId("1"), M, log.now, admitted=log.now) if ticket else None
    context.attempt.outcome.status, context.failure = status, failure
    log.now += took_s
    context.ended_at = log.now
    log.observe(context)


class TestAnswerLog:
    """It knows the mean and the 99th percentile of what was measured, and nothing else."""

    def test_nothing_was_measured(self, log):
        assert log.of(M, CHAT) is None

    def test_mean_and_longest_of_a_few(self, log):
        for took_s in (1.0, 2.0, 6.0):
            answered(log, took_s)
        assert log.of(M, CHAT) == AnswerTimes(3.0, 6.0)

    def test_the_longest_of_two_hundred_does_not_count(self, log):
        for took_s in (*[1.0] * 198, 50.0, 9.0):
            answered(log, took_s)
        assert log.of(M, CHAT).p99_s == 1.0

    def test_what_failed_or_had_no_worker_says_nothing(self, log):
        answered(log, 9.0, status=500)
        answered(log, 9.0, failure="client_gone")
        answered(log, 9.0, ticket=False)
        assert log.of(M, CHAT) is None

    def test_each_path_has_its_own(self, log):
        answered(log, 1.0)
        answered(log, 9.0, path="/v1/embeddings")
        assert log.of(M, CHAT) == AnswerTimes(1.0, 1.0)

    def test_old_ones_are_forgotten(self, log):
        answered(log, 100.0)
        log.now += FORGOTTEN_S
        answered(log, 1.0)
        assert log.of(M, CHAT) == AnswerTimes(1.0, 1.0)
        log.now += FORGOTTEN_S + 1
        assert log.of(M, CHAT) is None

    def test_only_so_many_are_kept(self, log):
        answered(log, 5.0)
        for _ in range(KEPT):
            answered(log, 0.001)
        assert log.of(M, CHAT).p99_s == pytest.approx(0.001)
