"""Who is told that a model loads."""

from __future__ import annotations

import pytest

from supervisor.errors import InvalidRequestError
from supervisor.gateway.head import RequestHead
from supervisor.gateway.identity.load_feedback import HEADER, wish_of
from tests.support.cases import cases


class TestHeader:
    """It overrules the key and the server, and stays here."""

    @cases(("value", "wanted"), [(b"true", True), (b" Yes ", True), (b"1", True), (b"FALSE", False), (b"0", False)])
    def test_says_it(self, value, wanted):
        assert wish_of([(b"accept", b"*/*"), (HEADER, value)]) is wanted

    def test_without_it_nothing_is_said(self):
        assert wish_of([(b"accept", b"*/*")]) is None

    @pytest.mark.parametrize("value", [b"perhaps", b"", b"\xff"])
    def test_anything_else_is_refused(self, value):
        with pytest.raises(InvalidRequestError, match="must be true or false"):
            wish_of([(HEADER, value)])

    def test_no_worker_gets_it(self):
        assert RequestHead([(HEADER, b"true"), (b"accept", b"*/*")]).for_worker == [(b"accept", b"*/*")]
