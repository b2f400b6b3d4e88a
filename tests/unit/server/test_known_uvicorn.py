"""What is looked at of an unknown uvicorn is what our code uses of it."""

from __future__ import annotations

import ast
import inspect

import pytest
import uvicorn

from supervisor.cli.serving import server
from supervisor.server import known_uvicorn, protocol, response_cycle, slow_client
from supervisor.server.known_uvicorn import TESTED, USED, UnknownUvicornError, refuse_unknown_uvicorn


def named(*modules) -> set[str]:
    """Every attribute that they read or set, and every method that they define."""
    nodes = [node for module in modules for node in ast.walk(ast.parse(inspect.getsource(module)))]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return defined | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def attributes(kind: type) -> set[str]:
    """Those that its class has, or its `__init__` sets."""
    nodes = ast.parse(inspect.getsource(inspect.getmodule(kind))).body
    (found,) = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
    own = {node.name for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    (init,) = [node for node in found.body if getattr(node, "name", "") == "__init__"]
    return own | {
        node.attr for node in ast.walk(init) if isinstance(node, ast.Attribute) and type(node.ctx) is ast.Store
    }


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        (response_cycle.HttpToolsProtocol, (protocol, response_cycle)),
        (response_cycle.RequestResponseCycle, (protocol, response_cycle)),
        (slow_client.FlowControl, (protocol, response_cycle)),
        (protocol.ServerState, (protocol, response_cycle)),
        (uvicorn.Server, (server,)),
    ],
)
def test_all_that_we_use_is_looked_at(kind, modules):
    """On the tested version, of which the names are known."""
    used = named(*modules) & attributes(kind) - {"__init__"}
    assert used <= {name for names in USED.values() for name in names.split()}


@pytest.mark.parametrize("version", ["0.53.9", "0.55.0", "0.540.0", "1.0"])
def test_another_version_that_has_it_is_taken(monkeypatch, version):
    monkeypatch.setattr(uvicorn, "__version__", version)
    refuse_unknown_uvicorn()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (response_cycle.HttpToolsProtocol, "timeout_keep_alive_handler"),
        (slow_client.FlowControl, "drain"),
        (uvicorn.Server, "on_tick"),
    ],
)
def test_one_that_lacks_some_is_refused(monkeypatch, kind, name):
    monkeypatch.delattr(kind, name)
    refuse_unknown_uvicorn()  # as long as it is the tested version
    monkeypatch.setattr(uvicorn, "__version__", "0.77.1")
    with pytest.raises(
        UnknownUvicornError, match=rf"^uvicorn 0\.77\.1 doesn't fit: {kind.__name__} has no {name}\. .* {TESTED}\. "
    ):
        refuse_unknown_uvicorn()


def test_one_that_takes_other_arguments_is_refused(monkeypatch):
    def init(self, *, scope):
        """Of another version."""

    monkeypatch.setattr(uvicorn, "__version__", "1.0")
    monkeypatch.setattr(response_cycle.RequestResponseCycle, "__init__", init)
    with pytest.raises(UnknownUvicornError, match="unexpected keyword argument 'transport'"):
        known_uvicorn.refuse_unknown_uvicorn()
