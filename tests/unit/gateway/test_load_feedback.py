"""Who is told that a model loads."""

from __future__ import annotations

import pytest

from supervisor.errors import InvalidRequestError
from supervisor.gateway.head import RequestHead
from supervisor.gateway.identity.load_feedback import HEADER, is_wanted
from tests.support.cases import cases


class TestHeader:
    """It overrules the key, and stays here."""

    @cases(("value", "wanted"), [(b"true", True), (b" Yes ", True), (b"1", True), (b"FALSE", False), (b"0", False)])
    def test_overrules_the_key(self, value, wanted):
        assert is_wanted([(b"accept", b"*/*"), (HEADER, value)], not wanted) is wanted

    @pytest.mark.parametrize("of_the_key", [True, False])
    def test_without_it_the_key_decides(self, of_the_key):
        assert is_wanted([(b"accept", b"*/*")], of_the_key) is of_the_key

    @pytest.mark.parametrize("value", [b"perhaps", b"", b"\xff"])
    def test_anything_else_is_refused(self, value):
        with pytest.raises(InvalidRequestError, match="must be true or false"):
            is_wanted([(HEADER, value)], True)

    def test_no_worker_gets_it(self):
        assert RequestHead([(HEADER, b"true"), (b"accept", b"*/*")]).for_worker == [(b"accept", b"*/*")]
