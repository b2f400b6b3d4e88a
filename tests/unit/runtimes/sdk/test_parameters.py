"""The treatment of a request's parameters by a worker."""

from __future__ import annotations

import pytest

from runtimes.sdk import parameters
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.parameters import check, ignored, refused, used

TABLE = {"language": used(), "user": ignored("no use"), "n": refused("one answer a request", 1)}


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.setattr(parameters, "_reported", set())


class TestUnknown:
    """A name that no table has is ignored, and the log tells of it once."""

    def test_is_ignored_and_told_once(self, capsys):
        for _ in range(3):
            check(TABLE, {"language": "en", "brand_new": {"a": 1}})
        assert capsys.readouterr().err == "ignored: the parameter 'brand_new', which this runtime doesn't know.\n"

    def test_a_slip_is_recognised(self, capsys):
        check(TABLE, {"langauge": "en"})
        assert "Did you mean 'language'?" in capsys.readouterr().err

    def test_the_log_stays_small_and_in_one_line_each(self, capsys):
        for number in range(1000):
            check(TABLE, {f"{number}\n\x1b" + "x" * 1000: 1})
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 100
        assert max(map(len, told)) < 200
        assert "\x1b" not in "".join(told)


class TestKnown:
    """An unsupported parameter is an error, except with values that change nothing."""

    @pytest.mark.parametrize("value", [2, "1", True])
    def test_is_refused(self, value):
        with pytest.raises(WorkerError, match="n: one answer a request") as told:
            check(TABLE, {"n": value})
        assert (told.value.status, told.value.param, told.value.code) == (400, "n", "unsupported_parameter")

    @pytest.mark.parametrize("given", [{"n": 1}, {"n": None}, {"user": "me"}, {}])
    def test_is_accepted(self, given):
        check(TABLE, given)


class TestHeader:
    """The response names each parameter without effect, whether it is in the table or not."""

    def test_what_had_no_effect(self):
        names = parameters.begin()
        check(TABLE, {"brand_new": 0, "language": "en", "user": "me", "n": 1})
        assert parameters.header(names) == b"brand_new, user"

    def test_what_is_null_was_not_asked_for(self):
        names = parameters.begin()
        check(TABLE, {"brand_new": None, "user": None})
        assert not names

    def test_each_request_has_its_own(self):
        first = parameters.begin()
        check(TABLE, {"user": "me"})
        second = parameters.begin()
        assert ([*first], [*second]) == (["user"], [])

    def test_nothing_can_be_slipped_into_it(self):
        names = [f"{number}\r\nX-Evil: \xe9,\U0001f642" + "x" * 1000 for number in range(1000)]
        value = parameters.header(names)
        assert value.startswith(b"0??X-Evil?????xxx")
        assert len(value.split(b", ")) == 100
        assert len(value) < 100 * 66
