"""Settings for all tests."""

import gc
import os
import signal
import ssl
import sys
from functools import cache

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support import build_llama_server, costs, counts, figures, groups, shares

# What is computed is judged, not how fast a shared machine was at it; and at the gate with the same inputs each time: a soak
# looks for others.
settings.register_profile(
    "shared",
    max_examples=counts.examples(100),
    deadline=None,
    derandomize=not counts.SOAK,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shared")

# Hundreds of daemons are started from this folder: each would compile it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.pop("COLUMNS", None)  # pytest-xdist's, for its own reports

# What a script runs in the background ignores Ctrl-C, and so would all that the tests start, and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every call of httpx makes a context anew, also for plain HTTP: reading the authorities' certificates takes 30 ms.
ssl.create_default_context = cache(ssl.create_default_context)

# Unless it is told otherwise, structlog draws each traceback with all variables, in a second of CPU time.
structlog.configure(
    [
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)


def pytest_addoption(parser):
    costs.add_option(parser)
    figures.add_option(parser)
    groups.add_option(parser)


@pytest.fixture(autouse=True, scope="session")
def runtime_dir(tmp_path_factory):
    """No command finds daemons of the user's, or of the tests in the processes beside this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


def pytest_configure(config):
    costs.register(config)
    figures.register(config)
    groups.register(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    return shares.processes()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return shares.scheduler(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    gc.disable()
    try:
        shares.compile_share(session.config)
        return (yield)
    finally:
        gc.freeze()  # six thousand tests, which no later collection needs to look through
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("binary"):
            item.add_marker(pytest.mark.timeout(3600))  # where it is still being compiled
    if hasattr(config, "workerinput"):
        shares.sort(items, is_built=config.workerinput["is_built"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Asked once: all processes have to put the tests in the same order."""
    node.workerinput["is_built"] = is_built()


@cache
def is_built():
    return build_llama_server.built() is not None


def pytest_runtest_setup(item):
    if item.get_closest_marker("binary") and build_llama_server.find() is None:
        pytest.skip("needs a compiled llama-server: make llama-server")
