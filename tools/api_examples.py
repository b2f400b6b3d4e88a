"""Record the demo's answers to the examples of the API: `llmux demo`, and then `python -m tools.api_examples URL`.

Writes supervisor/api/examples.json; /openapi.json and docs/reference/api.md take their answers from this file. Answers that the
demo lacks are in the operations themselves. Names of the machine and of folders are replaced, and long texts are cut.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any, Final

import httpx

from supervisor.api.openapi import EXAMPLES, key_of, sections
from supervisor.schema.operation import JSON, Operation

LONGEST: Final = 200
_TEXTS: Final = (JSON, "text/plain")


def ask(client: httpx.Client, operation: Operation) -> httpx.Response:
    """Send an operation's example. Raises httpx.HTTPError."""
    example = operation.example
    response = client.request(
        operation.method, example.path or operation.path, json=example.body, headers=dict(example.headers)
    )
    assert response.status_code in {operation.status, *operation.other_statuses}, f"{operation.name}: {response.text}"
    return response


def shown(value: Any, names: dict[str, str]) -> Any:
    """A recorded value without private names and long texts."""
    match value:
        case dict():
            return {key: shown(each, names) for key, each in value.items()}
        case list():
            return [shown(each, names) for each in value]
        case str():
            for name, other in names.items():
                value = value.replace(name, other)
            return value if len(value) <= LONGEST else value[:60] + "…"
        case _:
            return value


def main(url: str) -> None:
    """Send the examples to the freshly started daemon at `url`, and write the file."""
    names = {str(Path.home()): "/home/anna", socket.gethostname(): "gpu-box"}
    found = {}
    with httpx.Client(base_url=url, timeout=60) as client:
        for section in sections():
            for operation in section.operations:
                if operation.example.needs or operation.example.answer is not None:
                    continue
                response = ask(client, operation)
                kind = response.headers.get("content-type", "").partition(";")[0]
                if kind in _TEXTS and response.content:
                    answer = response.json() if kind == JSON else response.text
                    found[key_of(section, operation)] = shown(answer, names)
    EXAMPLES.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
