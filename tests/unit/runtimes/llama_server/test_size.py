"""Context, slots and batches that a configuration leaves open."""

from __future__ import annotations

import os

import pytest

from runtimes.llama_server.adapter.config import command_line, settings
from runtimes.sizing import Room
from tests.support import tiny
from tests.unit.runtimes.llama_server.test_estimate import ADAPTER, LLAMA_8B, MIB, config, write_head

GIB = 1024


@pytest.fixture(scope="module")
def eight_b(tmp_path_factory) -> str:
    """8 billion parameters in 4 bits: 4.6 GiB, without the weights themselves."""
    path = tmp_path_factory.mktemp("models") / "8b-Q4_K_M.gguf"
    write_head(path, "llama", LLAMA_8B)
    os.truncate(path, 4700 * MIB)
    return str(path)


def sized(path, gib, **keys):
    return ADAPTER.sized(config(path=path, **keys), Room(gib * GIB, "gpu0"))


class TestText:
    """A three-line configuration on common cards."""

    @pytest.mark.parametrize(
        ("gib", "context", "slots"),
        [(6, 4096, 1), (8, 16384, 2), (12, 32768, 4), (24, 32768, 4), (48, 131072, 4)],
    )
    def test_by_the_device(self, eight_b, gib, context, slots):
        chosen, sizing = sized(eight_b, gib)
        assert (chosen.n_ctx, chosen.parallel) == (context, slots) == (sizing.context, sizing.slots)
        assert ADAPTER.estimate(chosen).mib <= gib * GIB
        assert ADAPTER.target_inflight(chosen) == slots
        assert ADAPTER.capabilities(chosen).context == context

    def test_it_is_the_same_again(self, eight_b):
        first, again = (sized(eight_b, 12)[0] for _ in range(2))
        assert ADAPTER.memory_definition(first) == ADAPTER.memory_definition(again)
        assert ADAPTER.sized(first, Room(48 * GIB, "gpu0"))[0] == first

    def test_what_is_configured_wins(self, eight_b):
        chosen, sizing = sized(eight_b, 8, n_ctx=65536)
        assert (chosen.n_ctx, chosen.parallel, sizing.why) == (65536, 4, "as configured")
        assert sized(eight_b, 8, parallel=7)[0].parallel == 7
        assert sized(eight_b, 8, n_ctx=0)[1].context == 131072

    def test_a_smaller_cache_leaves_room_for_more(self, eight_b):
        assert sized(eight_b, 8, cache_type_k="q8_0", cache_type_v="q8_0")[0].n_ctx == 32768

    def test_slots_with_a_context_each_get_enough(self, eight_b):
        chosen, _ = sized(eight_b, 48, kv_unified=False)
        assert chosen.n_ctx // chosen.parallel == 32768

    @pytest.mark.parametrize("key", ["path", "mmproj", "draft_model"])
    def test_a_file_that_is_not_there(self, eight_b, key):
        chosen, sizing = sized(**({"path": eight_b} | {key: "/nowhere.gguf"}), gib=8)
        assert (chosen.n_ctx, sizing) == (32768, None)

    def test_the_worker_is_told(self, eight_b):
        line = command_line(settings(sized(eight_b, 8)[0], on_gpu=True, pooling=None))
        assert line[line.index("--ctx-size") + 1] == "16384"
        assert line[line.index("--parallel") + 1] == "2"


class TestInOnePiece:
    """Embeddings and reranking: the physical batch is the context, unless the last token is the text's embedding."""

    @pytest.mark.parametrize(
        "keys", [{"type": "embedding"}, {"type": "embedding", "pooling": "mean"}, {"rerank": True}]
    )
    def test_batches(self, keys):
        chosen, sizing = sized(str(tiny.model()), 8, **keys)
        assert (chosen.n_ctx, chosen.ubatch_size, chosen.batch_size, chosen.parallel) == (8192, 8192, 8192, 4)
        assert "one piece" in sizing.why

    def test_a_configured_context_is_followed(self):
        chosen, _ = sized(str(tiny.model()), 8, type="embedding", n_ctx=16384)
        assert (chosen.ubatch_size, chosen.batch_size) == (16384, 16384)
        chosen, _ = sized(str(tiny.model()), 8, type="embedding", ubatch_size=1024)
        assert (chosen.ubatch_size, chosen.batch_size) == (1024, 1024)

    def test_part_by_part(self):
        chosen, _ = sized(str(tiny.model()), 8, type="embedding", pooling="last")
        assert (chosen.n_ctx, chosen.ubatch_size) == (32768, None)
