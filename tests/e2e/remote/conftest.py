from __future__ import annotations

import os

import pytest

from tests.support.daemon import Daemon, fake, running
from tests.support.fake_http import serving
from tests.support.fake_remote import KEY, MODEL, Authority, StandIn

VARIABLE = "THEIR_API_KEY"
CLIENT_KEY = "sk-llmux-client"


def remote(stand_in: StandIn, **keys: object) -> dict[str, object]:
    """A model of the stand-in, as users configure it."""
    about = {"runtime": "openai_remote", "base_url": stand_in.url, "upstream_model": MODEL, "api_key_env": VARIABLE}
    return about | keys


@pytest.fixture(scope="session")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def plain():
    """A stand-in over HTTP."""
    with serving(StandIn()) as stand_in:
        yield stand_in


@pytest.fixture
def secure(authority):
    """A stand-in over HTTPS, whose certificate is good for localhost."""
    with serving(StandIn(authority.context("localhost"))) as stand_in:
        yield stand_in


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The daemon's further variables: the key of the stand-in, and proxies that must not be used."""
    return {VARIABLE: KEY, "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}


@pytest.fixture
def start(tmp_path, environment):
    """Start a daemon with these models."""
    stack = []

    def begin(models: dict[str, object], **config: object) -> Daemon:
        manager = running(tmp_path / f"daemon{len(stack)}", {"models": models, **config}, env=environment)
        (tmp_path / f"daemon{len(stack)}").mkdir()
        daemon = manager.__enter__()
        stack.append(manager)
        return daemon

    yield begin
    for manager in reversed(stack):
        manager.__exit__(None, None, None)


@pytest.fixture
def served(start, secure, authority) -> Daemon:
    """A daemon of the test's own, with `models_of` the HTTPS stand-in."""
    return start(models_of(secure, authority))


def models_of(secure: StandIn, authority: Authority) -> dict[str, object]:
    """One that requests must allow (`far`), one that they need not (`open`), and one that runs here."""
    ca_file = str(authority.file)
    return {
        "far": remote(secure, ca_file=ca_file),
        "open": remote(secure, ca_file=ca_file, allow_remote=True),
        "near": fake(),
    }


assert os.environ.get(VARIABLE) is None, f"{VARIABLE} is the tests' own"
