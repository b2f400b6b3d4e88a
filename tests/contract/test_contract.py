"""What every runtime promises (runtimes/base.py), checked on real processes started from nothing but the launch spec."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from runtimes.adapters.worker_adapter import WorkerAdapter
from runtimes.base import Endpoint
from runtimes.endpoints import SMALLEST
from tests.support.daemon import wait_until
from tests.support.limits import LIMIT_S


class TestConfiguration:
    """A runtime says beforehand what it can say, and serves what it names, no more."""

    def test_a_good_configuration_has_no_problems(self, runtime, context):
        assert runtime.adapter.check(runtime.config(), runtimes_dir=context.runtimes_dir) == ()

    def test_what_it_serves_is_exact_paths(self, runtime):
        endpoints = runtime.adapter.endpoints(runtime.config())
        assert Endpoint(runtime.question.path) in endpoints
        assert endpoints <= runtime.adapter.all_endpoints
        for endpoint in endpoints:
            assert endpoint.path.startswith("/")
            assert not set(endpoint.path) & set("*{}?#")

    def test_it_never_offers_what_is_the_supervisors(self, runtime):
        offered = {(endpoint.method, endpoint.path) for endpoint in runtime.adapter.endpoints(runtime.config())}
        for path in ("/models/load", "/models/unload", "/metrics", "/props", "/lora-adapters", "/v1/models", "/health"):
            assert ("POST", path) not in offered
        assert not {("GET", "/metrics"), ("GET", "/health"), ("GET", "/v1/models")} & offered

    def test_what_it_can_do_is_told(self, runtime):
        assert runtime.question.takes in runtime.adapter.capabilities(runtime.config()).modalities

    def test_what_only_the_supervisor_uses_does_not_change_the_memory_definition(self, runtime):
        plain = runtime.adapter.memory_definition(runtime.config())
        assert plain == runtime.adapter.memory_definition(runtime.config(priority=7, pin=True, target_inflight=3))


class TestLaunchSpec:
    """A launch spec is complete, and keeps its secret."""

    def test_the_program_exists(self, subject, context):
        program = Path(subject.adapter.launch(subject.config(), context).argv[0])
        assert program.is_absolute()
        assert os.access(program, os.X_OK)

    def test_the_key_is_in_the_environment_and_the_header_but_never_in_argv(self, subject, context):
        spec = subject.adapter.launch(subject.config(), context)
        assert context.key not in " ".join(spec.argv)
        assert context.key in spec.env.values()
        assert spec.auth == f"Bearer {context.key}"

    def test_it_listens_where_the_supervisor_said(self, subject, context):
        spec = subject.adapter.launch(subject.config(), context)
        assert (spec.host, spec.port) == (context.host, context.port)
        assert str(context.port) in " ".join(spec.argv)

    @pytest.mark.usefixtures("placed")
    def test_on_the_host_it_sees_no_gpu(self, subject, context):
        assert subject.adapter.launch(subject.config(), context).env["CUDA_VISIBLE_DEVICES"] == ""

    def test_launching_twice_gives_the_same(self, subject, context):
        first, second = (subject.adapter.launch(subject.config(), context) for _ in range(2))
        assert first == second

    @pytest.mark.usefixtures("placed")
    def test_patience_does_not_change_the_memory_definition(self, subject):
        plain = subject.adapter.memory_definition(subject.config())
        assert plain == subject.adapter.memory_definition(subject.config(grace_s=3, startup_limit_s=60))
        assert plain != subject.adapter.memory_definition(subject.config(env={"A": "1"}))


class TestWorker:
    """A worker serves, guards itself, and ends when it is told to."""

    def test_answers_in_json(self, subject, worker):
        answer = worker.ask(subject.question)
        assert answer.status_code == 200, answer.text
        assert subject.question.text_of(answer.json()).startswith(subject.question.answer)

    def test_answers_as_a_stream(self, subject, worker):
        answer = worker.ask(subject.question, stream=True)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        text = "".join(subject.question.delta_of(json.loads(event)) for event in events[:-1])
        assert text.startswith(subject.question.answer)

    def test_a_field_that_nobody_knows_breaks_nothing(self, subject, worker):
        """Clients send new fields all the time. Our own workers say that they had no effect."""
        answer = worker.ask(subject.question, brand_new="1", other_new="2")
        assert answer.status_code == 200, answer.text
        assert subject.question.text_of(answer.json()).startswith(subject.question.answer)
        if isinstance(subject.adapter, WorkerAdapter):
            assert answer.headers["x-llmux-ignored"] == "brand_new, other_new"
            assert "x-llmux-ignored" not in worker.ask(subject.question).headers

    def test_a_probe_through_inference_is_answered(self, subject, worker):
        asked = subject.adapter.smallest_request(subject.config())
        assert (asked is not None) == (subject.config().type in SMALLEST)
        if asked is None:
            return
        path, body = asked
        answer = worker.post(path, {"model": "the-model", **body})
        assert answer.status_code == 200, answer.text
        if subject.name in {
            "embedded",
            "binary",
            "transformers",
            "ctranslate2",
            "llama_cpp",
            "exllamav3",
        }:  # those with a model
            assert answer.json()["usage"]["completion_tokens"] == 1

    def test_refuses_requests_without_its_key(self, subject, worker):
        for path in subject.guarded:
            assert worker.post(path, {"model": "the-model"}, Authorization="Bearer wrong").status_code == 401
            assert worker.post(path, {"model": "the-model"}, Accept="*/*").status_code == 401

    def test_a_taken_port_ends_it_with_a_telling_log(self, subject, worker, start, context):
        second = start(subject, replace(context, port=worker.spec.port))
        assert second.process.wait(LIMIT_S) == 1
        assert "couldn't bind HTTP server socket" in second.log.read_text()
        assert worker.get("/health").is_success, worker.log.read_text()

    def test_ends_on_sigterm(self, subject, worker, start):
        """The last of this worker's tests; another one's, where it has ended already."""
        if worker.process.poll() is not None:
            worker = start(subject).wait_ready()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(LIMIT_S) in (0, -signal.SIGTERM)

    def test_ends_on_sigterm_while_it_starts(self, subject, start):
        worker = start(subject)
        wait_until(lambda: worker.log.read_bytes() or worker.listens(), what="the program runs, whatever it is doing")
        worker.process.send_signal(signal.SIGTERM)
        worker.process.wait(LIMIT_S)

    @pytest.mark.usefixtures("placed")
    def test_a_model_that_cant_be_loaded_ends_it_with_a_telling_log(self, subject, start):
        worker = start(subject, **subject.broken)
        assert worker.process.wait(LIMIT_S) == 1
        assert subject.complaint in worker.log.read_text()
