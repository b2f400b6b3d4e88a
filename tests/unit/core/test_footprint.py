"""The footprint chain, link by link, and what names give away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core.memory.footprint import DEFAULT_MIB, choose, from_name
from supervisor.core.types import Footprint, FootprintSource
from tests.support.cases import cases

COMPUTED = Footprint(6000, FootprintSource.COMPUTED, "weights and cache")


class TestChain:
    """The best source wins, and the answer says which it was."""

    def test_each_link_yields_to_the_one_before(self):
        known = {
            "explicit_mib": 4000,
            "computed": COMPUTED,
            "name": "tiny-1b-q4",
        }
        sources = []
        for dropped in ("explicit_mib", "computed", None):
            footprint = choose(**known)
            sources.append((footprint.source.value, footprint.mib))
            if dropped is not None:
                del known[dropped]
        assert sources == [
            ("explicit", 4000),
            ("computed", 6000),
            ("name", 680),
        ]

    def test_nothing_known_says_what_to_do(self):
        footprint = choose(name="mystery")

        assert (footprint.mib, footprint.source) == (DEFAULT_MIB, FootprintSource.DEFAULT)
        assert "vram_mib" in footprint.detail

    def test_a_runtimes_own_guess_from_file_sizes_keeps_its_source(self):
        guess = Footprint(7000, FootprintSource.FILE_SIZE, "two shards")

        assert choose(name="x", computed=guess) is guess

    @given(st.text())
    def test_there_is_always_an_answer_of_at_least_one_mib(self, name):
        footprint = choose(name=name)

        assert footprint.mib >= 1
        assert footprint.detail


class TestNames:
    """Sizes and formats as people write them."""

    @cases(
        ("name", "parameters", "bits"),
        [
            ("llama-7b", 7e9, 16),
            ("gpt-oss-20b", 20e9, 16),
            ("Qwen3.5-9B-FP8", 9e9, 8),
            ("qwen3.5-4b-q4_k_m", 4e9, 4.75),
            ("Qwen3.5-9B-Uncensored-Q8_0.gguf", 9e9, 8.75),
            ("mistral-7b-instruct-IQ2_XS", 7e9, 2.75),
            ("qwen3.5-35b-a3b-bf16", 35e9, 16),
            ("a3b-of-35b-fp16", 35e9, 16),
            ("mixtral-8x7b-int4", 56e9, 4.5),
            ("smollm2-135m-f32", 135e6, 32),
            ("phi-14b-awq", 14e9, 4.5),
            ("gemma-2.5b-8bit", 2.5e9, 8),
            ("some_1.1b_nvfp4", 1.1e9, 4.5),
        ],
    )
    def test_parameters_and_bits(self, name, parameters, bits):
        footprint = from_name(name)

        assert footprint is not None
        assert footprint.detail == f"{parameters / 1e9:g}B parameters at {bits:g} bits, by its name"
        assert footprint.mib == pytest.approx(parameters * bits / 8 * 1.2 / 2**20, abs=1)

    @cases("name", ["", "whisper", "phi-3", "model-4bit", "v2beta", "0b", "web2b2c", "3.5turbo"])
    def test_names_without_a_size(self, name):
        assert from_name(name) is None
