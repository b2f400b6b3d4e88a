"""Context and requests at once that a language model's configuration leaves open."""

from __future__ import annotations

import pytest

from runtimes.sizing import Room
from runtimes.transformers.adapter import TransformersAdapter
from tests.support import hf_folder

ADAPTER = TransformersAdapter()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    shape = {"max_position_embeddings": 131_072, "num_hidden_layers": 32, "num_key_value_heads": 8}
    folder = hf_folder.write(tmp_path_factory.mktemp("models") / "long", shape, size=300 << 20)
    return lambda **keys: ADAPTER.config(runtime="transformers", path=str(folder), **keys)


def sized(config, mib):
    chosen, sizing = ADAPTER.sized(config, Room(mib, "gpu0"))
    assert (chosen.n_ctx, chosen.parallel) == (sizing.context, sizing.slots)
    return chosen.n_ctx, chosen.parallel


class TestSized:
    """A long context comes before many requests, each of which has one of its own."""

    def test_by_the_device(self, config):
        one = ADAPTER.estimate(config(n_ctx=32_768, parallel=1)).mib
        two = ADAPTER.estimate(config(n_ctx=32_768, parallel=2)).mib
        assert sized(config(), one * 10 // 9 + 1) == (32_768, 1)
        assert sized(config(), 2 * two) == (32_768, 2)
        assert sized(config(), one // 2)[0] < 32_768
        assert sized(config(), 200_000) == (131_072, 4)

    def test_what_is_configured_wins(self, config):
        assert sized(config(n_ctx=500), 200_000) == (500, 4)
        assert sized(config(parallel=3), 200_000) == (131_072, 3)
        kept = config(type="asr")
        assert ADAPTER.sized(kept, Room(200_000, "gpu0")) == (kept, None)
