"""The sections `server` and `limits`: what their values may be, and what the scheduler gets of them."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from supervisor.catalog.sections.sections import MediaConfig
from tests.support.cases import cases

MODEL = "models:\n  m: {{cmd: x, vram_mib: 10, drain_s: {0}}}\nlimits: {{drain_s: {0}}}\n"


class TestMediaHosts:
    """Hosts in `server.media` are names, IP addresses and ports, and nothing else."""

    @cases(
        "host",
        ["h", "images.Example.com", "*.example.org", "*", "*:8443", "h:8443", "10.0.0.5", "10.0.0.5:1", "[fd00::5]:2"],
    )
    def test_valid(self, host):
        assert MediaConfig(hosts=(host,)).hosts == (host,)

    @cases(
        "host",
        [
            "",
            "https://h",
            "h/a",
            "10.0.0.0/8",
            "a b",
            "*.",
            "a.*.b",
            "*a",
            "h:",
            "h:0",
            "fd00::5",
            "user@h",
            "h.",
            "b\u00fcch.er",
        ],
    )
    def test_invalid(self, host):
        with pytest.raises(ValidationError):
            MediaConfig(hosts=(host,))


class TestDrainS:
    """`drain_s` is a number of seconds, `never`, or nothing."""

    @pytest.mark.parametrize(("written", "seconds"), [("0", 0.0), ("2.5", 2.5), ("never", math.inf), ("null", None)])
    def test_for_the_scheduler(self, folder, written, seconds):
        catalog = folder.load(MODEL.format(written))
        (spec,) = catalog.model_specs()
        assert (catalog.limits.limits().drain_s, spec.drain_s) == (seconds, seconds)

    def test_a_change_of_it_needs_no_new_worker(self, folder):
        before, after = (folder.load(MODEL.format(written)).models["m"] for written in ("1", "never"))
        assert before.definition == after.definition
