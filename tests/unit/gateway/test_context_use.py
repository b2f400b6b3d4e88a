"""What a request needs of a context that others use too, by what its model's requests lately took."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from supervisor.core.types import ModelId
from supervisor.gateway.attempt import NO_USAGE, Usage
from supervisor.gateway.route.context_use import KEPT, PICTURE, UNKNOWN, USUAL, ContextUse, measured
from supervisor.host.store.request_buffer import RequestBuffer
from tests.support.cases import cases

M, SHARED = ModelId("m"), 8192
PICTURE_URL = b'{"url":"data:image/png;base64,' + b"A" * 4000 + b'"}'


@pytest.fixture
def use():
    return ContextUse()


def end(use, text_bytes, usage, model="m"):
    ticket = SimpleNamespace(model=ModelId(model))
    use.observe(SimpleNamespace(attempt=SimpleNamespace(text_bytes=text_bytes, ticket=ticket), counted=lambda: usage))


class TestNeeded:
    """The prompt's tokens, and the answer's."""

    def test_nothing_is_known(self, use):
        assert use.needed(M, SHARED, 1000, 0, None) == 1000 / UNKNOWN + USUAL
        assert use.needed(M, SHARED, 1000, 2, None) == 1000 / UNKNOWN + 2 * PICTURE + USUAL

    @pytest.mark.parametrize(("most", "counts"), [(32000, USUAL), (100, 100), (0, 0)])
    def test_an_answer_is_as_long_as_usual_and_no_longer_than_allowed(self, use, most, counts):
        assert use.needed(M, SHARED, 0, 0, most) == counts

    def test_no_more_than_there_is(self, use):
        assert use.needed(M, SHARED, SHARED * 10, 0, None) == SHARED
        assert use.needed(M, SHARED, int((SHARED - 10) * UNKNOWN), 0, None) == SHARED

    def test_the_shortest_tokens_of_the_last_prompts_count(self, use):
        end(use, 4000, Usage(1000, 50))
        assert use.needed(M, SHARED, 4000, 0, 0) == 1000
        end(use, 3000, Usage(1000, 50), "m#1")  # another replica
        assert use.needed(M, SHARED, 3000, 0, 0) == 1000
        for _ in range(KEPT):
            end(use, 5000, Usage(1000, 50))
        assert use.needed(M, SHARED, 5000, 0, 0) == 1000, "the older ones are forgotten"
        assert use.needed(ModelId("other"), SHARED, 5000, 0, 0) == 2500

    def test_a_prompt_that_is_mostly_frame_says_nothing_of_tokens(self, use):
        end(use, 400, Usage(10, 7))
        assert use.needed(M, SHARED, 400, 0, None) == 400 / UNKNOWN + 7

    def test_nine_of_ten_answers(self, use):
        for tokens in [*range(10, 100, 10), 5000]:
            end(use, 10, Usage(10, tokens))
        assert use.needed(M, SHARED, 0, 0, None) == 5000
        end(use, 10, Usage(10, 1))
        assert use.needed(M, SHARED, 0, 0, None) == 90

    @pytest.mark.parametrize(("text_bytes", "usage"), [(0, Usage(1000, 5)), (4000, NO_USAGE)])
    def test_what_says_nothing(self, use, text_bytes, usage):
        end(use, text_bytes, usage)
        assert use.needed(M, SHARED, 4000, 0, None) == 2000 + USUAL


class TestMeasured:
    """Pictures are no text."""

    @cases(
        ("data", "text_bytes", "pictures"),
        [
            (b'{"a":1}', 7, 0),
            (b"[" + PICTURE_URL + b"," + PICTURE_URL + b"]", 67, 2),
            (b'{"type":"base64","data":"' + b"A" * 4000 + b'"}', 27, 1),
            (b'{"data":"a short text"}', 23, 0),
            (b'{"url":"data:image/png;base64,AAAA', 34, 0),
        ],
    )
    def test_of_a_body(self, data, text_bytes, pictures):
        assert measured(RequestBuffer(data=data)) == (text_bytes, pictures)
