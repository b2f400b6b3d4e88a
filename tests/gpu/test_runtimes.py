"""Every runtime on a real NVIDIA GPU: load, footprint, answer, kill, memory back, swaps, and others that take memory.

Install what is to be tried with `llmux runtimes install NAME --accelerator cuda`; LLMUX_RUNTIMES_DIR names the folder, otherwise
it is the usual one. Nothing else is installed. What is missing is said as the reason of a skip.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.gpu import card as cards
from bench.gpu import measures, subjects
from supervisor.catalog.loading.folders import runtimes_dir
from tests.support import daemon as daemons

CARD = cards.first()
RUNTIMES = Path(os.environ.get("LLMUX_RUNTIMES_DIR") or runtimes_dir())
SWAPS = 100
WITHIN = 0.3  # of the estimate, or the context's few hundred MiB, which differ between drivers
CONTEXT_MIB = 700
LEAK_MIB = 64

pytestmark = [
    pytest.mark.skipif(isinstance(CARD, str), reason=str(CARD)),
    pytest.mark.timeout(4 * 3600),  # a hundred swaps of what takes two minutes to load
]


@pytest.fixture(params=subjects.SUBJECTS)
def name(request) -> str:
    with subjects.written_by(RUNTIMES):
        if (reason := subjects.missing(request.param, CARD.id, RUNTIMES)) is not None:
            pytest.skip(reason)
    return request.param


@pytest.fixture
def daemon(name, tmp_path):
    """Two models of the subject, of which one may be loaded."""
    with subjects.written_by(RUNTIMES):
        model = subjects.SUBJECTS[name].config(CARD.id)
    config = {
        "devices": "auto",
        "server": {"runtimes_dir": str(RUNTIMES)},
        "models": {"a": model, "b": model},
        "limits": subjects.LIMITS,
    }
    with daemons.running(tmp_path, config) as daemon:
        yield daemon


def test_a_life(daemon, name, record_property):
    """Load, footprint, answer, no context of the supervisor's, kill, memory back."""
    subject, before_mib = subjects.SUBJECTS[name], measures.settled(CARD)
    load_s = measures.load(daemon, "a")
    measures.answered(daemon, subject, "a")
    found = measures.footprint(daemon, CARD, "a", before_mib)
    assert measures.contexts(daemon, CARD) == []
    back_s = measures.kill(daemon, CARD, "a", before_mib)
    figures = {"load_s": load_s, "estimate_mib": found.estimate_mib, "taken_mib": found.taken_mib, "back_s": back_s}
    for key, figure in figures.items():
        record_property(key, figure)
    print(f"\n{name}: {figures}")
    assert found.taken_mib > 0
    assert abs(found.estimate_mib - found.taken_mib) <= max(WITHIN * found.taken_mib, CONTEXT_MIB)


def test_two_models_take_turns(daemon, name, record_property):
    """A hundred swaps lose no memory, or as many as the subject says."""
    found = measures.swaps(daemon, CARD, subjects.SUBJECTS[name], ["a", "b"], min(SWAPS, subjects.SUBJECTS[name].swaps))
    record_property("swap_s", found.median_s)
    record_property("leak_mib", found.leak_mib)
    print(f"\n{name}: {found}")
    assert found.leak_mib <= LEAK_MIB


def test_an_outside_process_takes_memory_during_a_load(daemon, name):
    """The load succeeds, or fails and says why. The daemon goes on, and once the other has left, models load again."""
    subject = subjects.SUBJECTS[name]
    outsider = measures.Outsider(CARD.found.total_mib, env={"CUDA_VISIBLE_DEVICES": CARD.found.uuid})
    found = measures.load_beside(daemon, "a", outsider)
    print(f"\n{name}: {found}")
    assert found.failure is None or "was not loaded" in found.failure
    measures.answered(daemon, subject, "b")
