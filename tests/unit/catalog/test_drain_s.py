"""`drain_s`: a number of seconds, `never`, or nothing."""

from __future__ import annotations

import math

import pytest

MODEL = "models:\n  m: {{cmd: x, vram_mib: 10, drain_s: {0}}}\nlimits: {{drain_s: {0}}}\n"


@pytest.mark.parametrize(("written", "seconds"), [("0", 0.0), ("2.5", 2.5), ("never", math.inf), ("null", None)])
def test_for_the_scheduler(folder, written, seconds):
    catalog = folder.load(MODEL.format(written))
    (spec,) = catalog.model_specs()
    assert (catalog.limits.limits().drain_s, spec.drain_s) == (seconds, seconds)


def test_a_change_of_it_needs_no_new_worker(folder):
    before, after = (folder.load(MODEL.format(written)).models["m"] for written in ("1", "never"))
    assert before.definition == after.definition
