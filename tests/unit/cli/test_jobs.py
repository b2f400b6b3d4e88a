"""`llmux jobs wait`: what it says when the daemon ends first."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from supervisor.cli.client import Client, ServerSent
from supervisor.cli.commands.jobs import jobs

ERROR = "Error: llmux ended before job_1 was over; wait again: llmux jobs wait job_1\n"
RUNNING = {"id": "job_1", "state": "running", "ended_at": None}


@pytest.mark.parametrize(
    ("events", "words", "stdout"),
    [
        ([], [], ""),
        ([], ["--json"], ""),
        ([RUNNING], [], "job_1 is running\n"),
        ([RUNNING], ["--json"], f"{json.dumps(RUNNING)}\n"),
    ],
)
def test_the_daemon_ends_before_the_job(monkeypatch, events, words, stdout):
    sent = [ServerSent("job", None, json.dumps(event)) for event in events]
    monkeypatch.setattr(Client, "events", lambda *_, **__: iter(sent))
    result = CliRunner().invoke(jobs, ["wait", "job_1", "--url", "http://127.0.0.1:1", *words])
    assert (result.exit_code, result.stdout, result.stderr) == (1, stdout, ERROR)
