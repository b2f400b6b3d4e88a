from __future__ import annotations

from supervisor.core.types import Generation, ModelId
from supervisor.host.memory.free_delta import FreeDelta

A = (ModelId("a"), Generation(1))
B = (ModelId("b"), Generation(1))


class TestFreeDelta:
    """A loading worker's use is the fall of free memory, as long as nothing else of ours changes."""

    def test_the_fall_since_before_it_appeared_is_its_use(self):
        delta = FreeDelta()
        assert delta.update(16000, {}) == {}
        assert delta.update(15000, {A: True}) == {A: 1000}
        assert delta.update(9000, {A: True}) == {A: 7000}

    def test_the_first_reading_after_loading_is_final(self):
        delta = FreeDelta()
        delta.update(16000, {})
        delta.update(9000, {A: True})
        assert delta.update(8000, {A: False}) == {A: 8000}
        assert delta.update(2000, {A: False}) == {A: 8000}

    def test_two_workers_one_after_the_other(self):
        delta = FreeDelta()
        delta.update(16000, {})
        delta.update(8000, {A: False})
        assert delta.update(5000, {A: False, B: True}) == {A: 8000, B: 3000}
        assert delta.update(4000, {A: False, B: False}) == {A: 8000, B: 4000}

    def test_two_loading_at_once_cannot_be_told_apart(self):
        delta = FreeDelta()
        delta.update(16000, {})
        assert delta.update(9000, {A: True, B: True}) == {A: None, B: None}
        delta.update(16000, {})
        delta.update(15000, {A: True})
        assert delta.update(9000, {A: True, B: True}) == {A: None, B: None}

    def test_a_departure_while_loading_spoils_it(self):
        delta = FreeDelta()
        delta.update(16000, {})
        delta.update(12000, {A: False})
        delta.update(11000, {A: False, B: True})
        assert delta.update(13000, {B: True}) == {B: None}
        assert delta.update(12000, {B: True}) == {B: None}

    def test_without_a_reading_before_it_appeared_nothing_is_known(self):
        delta = FreeDelta()
        assert delta.update(9000, {A: True}) == {A: None}

    def test_a_worker_that_left_is_forgotten_and_its_next_generation_counts_anew(self):
        delta = FreeDelta()
        delta.update(16000, {})
        delta.update(9000, {A: True})
        assert delta.update(16000, {}) == {}
        again = (A[0], Generation(2))
        assert delta.update(10000, {again: True}) == {again: 6000}

    def test_strangers_giving_memory_back_never_make_a_use_negative(self):
        delta = FreeDelta()
        delta.update(8000, {})
        assert delta.update(9000, {A: True}) == {A: 0}
