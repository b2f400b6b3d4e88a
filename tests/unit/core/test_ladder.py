"""The choice of a task's candidate, and the guard against cloud fallbacks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from supervisor.core.ladder import Rung, allowed, choose
from tests.support.cases import cases

COLD, WARM, REMOTE = Rung(), Rung(is_ready=True), Rung(is_ready=True, is_remote=True)

rungs = st.lists(st.builds(Rung, st.booleans(), st.booleans()), min_size=1, max_size=8)
positions = st.sets(st.integers(0, 7))


class TestChoice:
    """Warm before cold, then the order of the list; a pinned primary before all."""

    @cases(
        ("ladder", "chosen"),
        [
            ((COLD, COLD), 0),
            ((COLD, WARM), 1),
            ((WARM, WARM), 0),
            ((COLD, COLD, WARM), 2),
            ((COLD, REMOTE), 0),
            ((COLD, REMOTE, WARM), 2),
            ((REMOTE, WARM), 0),
            ((Rung(is_remote=True), WARM), 1),
        ],
    )
    def test_the_first(self, ladder, chosen):
        assert chosen == choose(ladder)

    def test_a_pinned_primary_is_not_swapped_for_a_warm_one(self):
        assert choose((COLD, WARM), pin_primary=True) == 0
        assert choose((COLD, COLD, WARM), pin_primary=True, without={0}) == 2

    def test_the_next_one_after_a_failure(self):
        assert choose((COLD, COLD, COLD), without={0}) == 1
        assert choose((COLD, COLD, WARM), without={0}) == 2
        assert choose((COLD, REMOTE, COLD), without={0}) == 1
        assert choose((COLD, REMOTE), without={0}, allow_cloud_fallback=False) is None

    @given(rungs, st.booleans(), st.booleans(), positions)
    def test_it_is_one_that_is_left_or_none(self, ladder, pin, cloud, without):
        left = set(allowed(ladder, allow_cloud_fallback=cloud)) - without
        chosen = choose(ladder, pin_primary=pin, allow_cloud_fallback=cloud, without=without)
        assert chosen in left if left else chosen is None

    @given(rungs, st.booleans())
    def test_a_pinned_primary_is_first_whatever_is_warm(self, ladder, cloud):
        assert choose(ladder, pin_primary=True, allow_cloud_fallback=cloud) == 0

    @given(rungs, st.booleans(), positions)
    def test_a_cold_one_is_chosen_only_where_no_warm_one_of_ours_is(self, ladder, cloud, without):
        chosen = choose(ladder, allow_cloud_fallback=cloud, without=without)
        if chosen is not None and not ladder[chosen].is_ready:
            assert not any(rung.is_ready and not rung.is_remote for at, rung in enumerate(ladder) if at not in without)


class TestGuard:
    """It takes remote models out of the fallback positions, never the primary, so that it can't empty a ladder."""

    @given(rungs, st.booleans())
    def test_the_primary_stays(self, ladder, cloud):
        assert allowed(ladder, allow_cloud_fallback=cloud)[0] == 0
        assert choose(ladder, allow_cloud_fallback=cloud) is not None

    @given(rungs)
    def test_no_remote_fallback_is_left(self, ladder):
        left = allowed(ladder, allow_cloud_fallback=False)
        assert not any(ladder[at].is_remote for at in left[1:])
        assert {at for at, rung in enumerate(ladder) if not rung.is_remote} <= set(left)

    @given(rungs)
    def test_switched_on_everything_is_left(self, ladder):
        assert tuple(range(len(ladder))) == allowed(ladder, allow_cloud_fallback=True)
