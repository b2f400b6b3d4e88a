"""The table of `python -m bench.router`: what isn't as it should be stands out, and a loss is said."""

from __future__ import annotations

import pytest

from bench import report
from bench.router import page
from bench.router.races import RACES, Outcome
from bench.router.server import ROUTER, Answer
from bench.targets import LLMUX

RACE = RACES[0]
GOOD = Outcome((Answer("good", 1.0), Answer("good", 2.0)), most=1)


def test_a_cell_has_the_good_answers_the_workers_and_the_longest_wait():
    assert page.cell(RACE, [GOOD, GOOD]) == "4 of 4; 1; 2.00 s"


def test_what_is_wrong_is_bold():
    outcome = Outcome((Answer("good", 1.0), Answer("hung", 30.0)), most=RACE.most + 1)
    assert page.cell(RACE, [outcome]) == "**1 of 2** (1 hung); **2**; 30.0 s"


def test_waits_are_compared_only_where_all_answers_were_good():
    slow = Outcome((Answer("good", 3.0),), most=1)
    assert page.ratios({RACE: {LLMUX: [slow], ROUTER: [GOOD]}}, {}) == {RACE.what: [1.5]}
    lost = Outcome((Answer("error", 0.1),), most=1)
    assert page.ratios({RACE: {LLMUX: [slow], ROUTER: [lost]}}, {}) == {}


def test_losses_are_said_the_most_first():
    samples = {
        "memory": {LLMUX: [4.0], ROUTER: [2.0]},
        "CPU": {LLMUX: [9.0], ROUTER: [1.0]},
        "wait": {LLMUX: [1.0], ROUTER: [2.0]},
    }
    assert page.losses({}, samples).endswith(": CPU (9.00 times); memory (2.00 times).")


def test_a_bar_beyond_the_end_has_its_value_beside_its_name():
    drawn = report.bars([("CPU", [9.0], 1.0), ("wait", [1.0], 1.0)], cap=5)
    assert ">CPU: 9.00<" in drawn
    assert ">wait<" in drawn


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.run.__name__)
def test_no_race_allows_more_workers_than_fit(race):
    assert race.most <= race.limit
