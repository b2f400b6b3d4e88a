"""What takes a while to make is made once per machine, and kept in the user's cache by a name that tells what it depends on.

That is: its parameters; the sources of what makes it, with all that these import of this repository, and the data beside them;
the Python that runs it, and the packages which that has. Whatever of these changes, it is made anew beside the old one. It appears
whole or not at all. Processes that want the same thing at the same time wait for the one that makes it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from supervisor.host.environments import venvs
from supervisor.host.store.files import locked
from tests.support import environments
from tests.support.build_llama_server import CACHE
from tests.support.limits import LIMIT_S

FOLDER = CACHE / "models"
REPOSITORY = Path(__file__).parents[2]
GENERATORS = Path(__file__).parent / "generators"
OWN = "the Python of the tests"


def made(
    name: str, write: Callable[[Path], object], source: Path | None, of: object = None, *, by: Sequence[str] = (OWN,)
) -> Path:
    """The file or folder that `write` writes to the path that it is given.

    `source` is the module that `write` calls, or the program that it runs; `of` is what else it depends on; `by` are the runtimes
    whose environments it uses. Paths of what was made here tell what that depends on.
    """
    told = repr((of, [_packages(runtime) for runtime in by], _digest(source) if source is not None else None))
    stem, suffix = Path(name).stem, Path(name).suffix
    path = FOLDER / f"{stem}-{hashlib.sha256(told.encode()).hexdigest()[:16]}{suffix}"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with locked(FOLDER / f".{path.name}.lock", lambda: None):
            if not path.exists():
                aside = FOLDER / f".{path.name}.part{suffix}"
                _remove(aside)  # whoever made it was killed
                write(aside)
                aside.rename(path)
    return path


def generated(
    name: str, generator: str, runtime: str, *words: str, beside: Sequence[str] = (), **options: object
) -> Path:
    """The folder that a program of `generators` writes, run by a runtime's Python as `program FOLDER '{"option": …}' word …`.

    `beside` are other runtimes whose environments it uses. `words` are not a part of what it depends on.
    """

    def write(folder: Path) -> None:
        command = command_of(generator, runtime, str(folder), json.dumps(options), *words)
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr

    return made(name, write, program(generator), options, by=(runtime, *beside))


def command_of(generator: str, runtime: str, *words: str) -> list[str]:
    """How a program of `generators` is run. Isolated: its folder is no place for libraries, which some of them are named like."""
    return [str(python(runtime)), "-I", str(program(generator)), *words]


def program(generator: str) -> Path:
    """Its file."""
    return GENERATORS / f"{generator}.py"


def python(runtime: str) -> Path:
    """The Python of a runtime's environment, which is installed when it isn't there."""
    return environments.installed(runtime) / runtime / "bin" / "python"


@cache
def _packages(runtime: str) -> str:
    if runtime == OWN:
        return f"{sys.version} {_hash(REPOSITORY / 'requirements-dev.lock')}"
    environment = venvs.installed(runtime, environments.installed(runtime))
    assert environment is not None
    return f"{environment.python} {environment.device} {environment.lock_digest}"


@cache
def _digest(source: Path) -> str:
    """Of a module, of those that it imports of this repository, and of the data beside each."""
    found: set[Path] = set()
    ahead = [source]
    while ahead:
        path = ahead.pop()
        if path not in found:
            found |= {
                path,
                *(other for other in path.parent.iterdir() if other.is_file() and other.suffix not in {".py", ".pyc"}),
            }
            ahead += _imported(path)
    return repr(sorted((str(path.relative_to(REPOSITORY)), _hash(path)) for path in found))


def _imported(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            place = REPOSITORY.joinpath(*name.split("."))
            yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists())


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
