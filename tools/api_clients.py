"""Generate our own clients' calls from the daemon's operations: the command line's typed calls, and the dashboard's paths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from supervisor.api.routing import GROUPS
from supervisor.gateway.operation import Endpoint

_PLACE: Final = re.compile(r"{(\w+)(?::\w+)?}")


def commands() -> str:
    """The text of supervisor/cli/operations.py."""
    calls, modules = [], set()
    for name, endpoint in _endpoints():
        path = _PLACE.sub(r"{\1}", endpoint.path)
        answer = endpoint.answer
        if isinstance(answer, type) and issubclass(answer, msgspec.Struct):
            module = answer.__module__.rpartition(".")[2]
            modules.add(module)
            kind = f"{module}.{answer.__name__}"
            calls.append(f'{name.upper()}: Call[{kind}] = Call("{endpoint.method}", "{path}", "{kind}")')
        else:
            calls.append(f'{name.upper()} = Operation("{endpoint.method}", "{path}")')
    return (
        '"""The operations of a daemon, as commands call them. `make docs` writes this from `supervisor.api`."""\n\n'
        "from __future__ import annotations\n\nfrom typing import TYPE_CHECKING\n\n"
        "from supervisor.cli.client import Call, Operation\n\n"
        "if TYPE_CHECKING:  # a command is declared without them\n"
        f"    from supervisor.schema import {', '.join(sorted(modules))}\n\n" + "\n".join(calls) + "\n"
    )


def dashboard() -> str:
    """The text of supervisor/server/ui/js/operations.js."""
    lines = [
        "// The operations of the daemon. `make docs` writes this from supervisor/api.",
        "",
        "const operation = (method, path, query) => ({ method, path: query ? `${path}?${new URLSearchParams(query)}` : path });",
        "",
    ]
    for name, endpoint in _endpoints():
        words = name.split("_")
        camel = words[0] + "".join(word.capitalize() for word in words[1:])
        places = _PLACE.findall(endpoint.path)
        names = [*places, *(["query"] if endpoint.query is not None else [])]
        path = _PLACE.sub(r"${encodeURIComponent(\1)}", endpoint.path)
        quoted = f"`{path}`" if places else f'"{path}"'
        query = ", query" if endpoint.query is not None else ""
        lines.append(f'export const {camel} = ({", ".join(names)}) => operation("{endpoint.method}", {quoted}{query});')
    return "\n".join(lines) + "\n"


def _endpoints() -> Iterator[tuple[str, Endpoint]]:
    """Each endpoint with the name of its function. Raises AssertionError for a duplicate name."""
    found = [(endpoint.run.__name__, endpoint) for group in GROUPS for endpoint in group.endpoints if endpoint.run]
    assert len({name for name, _ in found}) == len(found)
    yield from found
