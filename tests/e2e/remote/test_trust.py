"""Who is trusted, and when a request is sent again: the client to remotes, through a real daemon."""

from __future__ import annotations

import datetime as dt
import socket
import ssl
import threading
import time

import pytest
import trustme

from tests.e2e.remote.conftest import remote
from tests.support.daemon import Daemon, running, wait_until
from tests.support.fake_http import serving
from tests.support.fake_remote import Reply, StandIn
from tests.support.limits import LIMIT_S


class TestCertificates:
    """A remote proves who it is before it gets a byte."""

    def test_unknown_authority(self, start, secure):
        daemon = start({"far": remote(secure, allow_remote=True)})
        answer = daemon.chat("far")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_certificate")
        assert "ca_file" in answer.json()["error"]["message"]
        assert secure.seen == []

    def test_another_name(self, start, authority):
        with serving(StandIn(authority.context("elsewhere.example.com"))) as stand_in:
            daemon = start({"far": remote(stand_in, allow_remote=True, ca_file=str(authority.file), max_retries=3)})
            answer = daemon.chat("far")
            assert answer.json()["error"]["code"] == "upstream_certificate"
            assert stand_in.seen == []

    def test_expired(self, start, tmp_path):
        ca = trustme.CA()
        ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        past = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
        context = trustme_context(ca.issue_cert("localhost", not_before=past, not_after=past + dt.timedelta(1)))
        with serving(StandIn(context)) as stand_in:
            daemon = start({"far": remote(stand_in, allow_remote=True, ca_file=str(tmp_path / "ca.pem"))})
            assert "expired" in daemon.chat("far").json()["error"]["message"]
            assert stand_in.seen == []

    def test_what_is_no_certificate(self, start, secure, tmp_path):
        (tmp_path / "ca.pem").write_text("no certificate")
        daemon = start({"far": remote(secure, ca_file=str(tmp_path / "ca.pem"))})
        assert "ca_file" in daemon.wait_state("far", "failed")["reason"]

    def test_plain_text_to_https(self, start, secure):
        daemon = start({"far": remote(secure, allow_remote=True, base_url=secure.url.replace("https", "http"))})
        assert daemon.chat("far").json()["error"]["code"] == "upstream_error"


def trustme_context(leaf: trustme.LeafCert):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    leaf.configure_cert(context)
    return context


def busy(status: int, **headers: str) -> Reply:
    return Reply(status, b'{"error": {"message": "busy"}}', {name.replace("_", "-"): v for name, v in headers.items()})


@pytest.fixture(scope="module")
def shared(tmp_path_factory, environment):
    """A remote, and a daemon whose models of it try again as often as they are called."""
    with serving(StandIn()) as stand_in:
        times = {"never": {}, "once": {"max_retries": 1}, "twice": {"max_retries": 2}, "thrice": {"max_retries": 3}}
        times["hasty"] = {"max_retries": 3, "retry_wait_s": 1.0}
        models = {name: remote(stand_in, allow_remote=True, **keys) for name, keys in times.items()}
        with running(tmp_path_factory.mktemp("repeating"), {"models": models}, env=environment) as daemon:
            yield stand_in, daemon


class TestRepetitions:
    """Only before an answer has begun, and only where nothing can have been done."""

    @pytest.fixture
    def plain(self, shared) -> StandIn:
        shared[0].begin_anew()
        return shared[0]

    @pytest.fixture
    def repeating(self, shared) -> Daemon:
        return shared[1]

    @pytest.mark.parametrize("status", [429, 503])
    def test_busy_and_then_not(self, repeating, plain, status):
        plain.replies += [busy(status, Retry_After="0"), busy(status, Retry_After="0")]
        assert repeating.chat("twice").status_code == 200
        first, *others = [seen.body for seen in plain.inference()]
        assert others == [first, first]

    def test_as_often_as_configured(self, repeating, plain):
        plain.replies += [busy(429, Retry_After="0")] * 3
        answer = repeating.chat("once")
        assert (answer.status_code, answer.json()["error"]["message"]) == (429, "busy")
        assert len(plain.inference()) == 2

    def test_not_by_default(self, repeating, plain):
        plain.replies.append(busy(503, Retry_After="0"))
        assert repeating.chat("never").status_code == 503
        assert len(plain.inference()) == 1

    def test_not_when_it_is_to_wait_too_long(self, repeating, plain):
        plain.replies.append(busy(429, Retry_After="60"))
        answer = repeating.chat("hasty")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "60")
        assert len(plain.inference()) == 1

    def test_waits_as_asked(self, repeating, plain):
        plain.replies.append(busy(429, Retry_After="1"))
        began = time.monotonic()
        assert repeating.chat("once").status_code == 200
        assert time.monotonic() - began >= 1

    @pytest.mark.parametrize("status", [400, 404, 500, 502])
    def test_other_errors_are_not_tried_again(self, repeating, plain, status):
        plain.replies.append(busy(status))
        assert repeating.chat("thrice").status_code == status
        assert len(plain.inference()) == 1

    def test_nor_a_connection_that_broke(self, repeating, plain):
        plain.replies.append(Reply(close_at_once=True))
        assert repeating.chat("thrice").json()["error"]["code"] == "upstream_error"
        assert len(plain.inference()) == 1

    def test_until_somebody_listens(self, start):
        stand_in = StandIn(listening=False)
        daemon = start({"far": remote(stand_in, allow_remote=True, max_retries=10)})
        answers = []
        client = threading.Thread(target=lambda: answers.append(daemon.chat("far")))
        client.start()
        wait_until(lambda: daemon.events("remote.retried"))
        stand_in.server_activate()
        with serving(stand_in):
            client.join()
            assert answers[0].status_code == 200
            assert len(stand_in.inference()) == 1
        assert "Connection refused" in daemon.events("remote.retried")[0]["reason"]

    def test_nobody_listens(self, start):
        with StandIn(listening=False) as absent:
            daemon = start({"far": remote(absent, allow_remote=True)})
            answer = daemon.chat("far")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
        assert "Connection refused" in answer.json()["error"]["message"]

    def test_a_name_that_nobody_has(self, start, plain):
        daemon = start({"far": remote(plain, allow_remote=True, base_url="http://no-such-host.invalid/v1")})
        assert "can't be reached" in daemon.chat("far").json()["error"]["message"]


class TestPatience:
    """A remote that says nothing is given up."""

    def test_before_the_answer(self, start):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
            daemon = start({"far": {**silent_remote(url), "first_byte_s": 0.3, "connect_s": 3.0, "max_retries": 3}})
            answer = daemon.chat("far")
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")

    def test_within_the_answer(self, start, plain):
        daemon = start({"far": remote(plain, allow_remote=True, stream_idle_s=0.3)})
        plain.hold.clear()
        body = {"model": "far", "messages": [], "stream": True}
        with daemon.client().stream("POST", "/v1/chat/completions", json=body) as response:
            received = b"".join(response.iter_raw())
        assert b"upstream_timeout" in received
        assert plain.left.wait(LIMIT_S)


def silent_remote(url: str) -> dict[str, object]:
    return {"runtime": "openai_remote", "base_url": url, "upstream_model": "m", "allow_remote": True}
