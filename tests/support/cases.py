"""Many small cases in one test: a test for each would cost pytest more than they do themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest

Test = Callable[..., Any]


class Failures:
    """What failed, and in which case."""

    def __init__(self) -> None:
        self._found: list[BaseException] = []

    @contextmanager
    def of(self, case: object) -> Iterator[None]:
        """Whatever fails in there is kept for the end."""
        try:
            yield
        except (Exception, pytest.fail.Exception) as failure:
            failure.add_note(f"case: {case}")
            self._found.append(failure)

    def tell(self) -> None:
        """Raise all of them. Their notes and messages say which cases they are."""
        if self._found:
            told = "\n".join(f"  {each.__notes__[-1]}: {type(each).__name__}: {each}" for each in self._found)
            raise BaseExceptionGroup(f"{len(self._found)} failed:\n{told}\n", self._found)


def _values(given: Any) -> Sequence[Any]:
    """Those of a `pytest.param` too."""
    only = given[0] if len(given) == 1 else given
    return only.values if isinstance(only, type(pytest.param())) else given  # type: ignore[no-any-return]


def cases(names: str | Iterable[str], values: Iterable[Any], ids: object = None) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, but it is one test that goes through all cases, and tells all that fail.

    Its fixtures are made once. A case must leave behind nothing that another one meets.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    found = [_values(value) if len(keys) > 1 else _values((value,)) for value in values]
    assert found, "no case"
    arguments = [dict(zip(keys, each, strict=True)) for each in found]
    shown = [ids[at] if isinstance(ids, list | tuple) else each for at, each in enumerate(arguments)]

    def decorated(test: Test) -> Test:
        if inspect.iscoroutinefunction(test):

            @wraps(test, updated=())
            async def tried(*args: Any, **more: Any) -> None:
                failures = Failures()
                for case, each in zip(shown, arguments, strict=True):
                    with failures.of(case):
                        await test(*args, **each, **more)
                failures.tell()
        else:

            @wraps(test, updated=())
            def tried(*args: Any, **more: Any) -> None:
                failures = Failures()
                for case, each in zip(shown, arguments, strict=True):
                    with failures.of(case):
                        test(*args, **each, **more)
                failures.tell()

        whole = inspect.signature(test)
        left = [each for name, each in whole.parameters.items() if name not in keys]
        assert len(left) == len(whole.parameters) - len(keys), "a name that the test doesn't take"
        if hasattr(test, "pytestmark"):
            tried.pytestmark = test.pytestmark  # type: ignore[attr-defined]
        tried.__signature__ = whole.replace(parameters=left)  # type: ignore[attr-defined]
        return tried

    return decorated
