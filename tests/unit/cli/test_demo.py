"""The demonstration's files: what is written is a model for every reader, and a configuration the catalog takes."""

from __future__ import annotations

import gguf as reference
import numpy as np
import pytest

from supervisor.catalog import load
from supervisor.cli.demo import gguf, tiny, write_demo


class TestWriter:
    """The reference implementation reads back what was written."""

    def test_keys_and_tensors(self, tmp_path):
        path = tmp_path / "x.gguf"
        keys = {"general.architecture": "x", "x.int": 7, "x.float": 0.5, "x.yes": True, "x.names": ["a", "é"]}
        keys |= {"x.numbers": [1, 2], "x.means": [0.5, 0.25]}
        tensors = {"zeros": gguf.Tensor((3, 5)), "ones": gguf.ones(7), "more": gguf.Tensor((2, 2), gguf.ones(4).values)}
        gguf.write(path, keys, tensors)
        reader = reference.GGUFReader(path)
        for key, value in keys.items():
            assert reader.fields[key].contents() == value
        shapes = {tensor.name: [int(n) for n in tensor.shape] for tensor in reader.tensors}
        assert shapes == {"zeros": [5, 3], "ones": [7], "more": [2, 2]}
        assert [float(np.sum(tensor.data)) for tensor in reader.tensors] == [0.0, 7.0, 4.0]

    @pytest.mark.parametrize("size_mib", [20, 100, 300])
    def test_a_model_has_the_size_asked_for_and_takes_no_disk(self, tmp_path, size_mib):
        path = tmp_path / "m.gguf"
        tiny.write(path, tiny.Tiny(size_mib=size_mib))
        assert path.stat().st_size / (1 << 20) == pytest.approx(size_mib, rel=0.03)
        assert path.stat().st_blocks * 512 < 5 << 20

    def test_a_script_that_would_fork_is_refused(self, tmp_path):
        with pytest.raises(AssertionError, match="two successors"):
            tiny.write(tmp_path / "m.gguf", tiny.Tiny(answer="say one two one three"))


class TestDemo:
    """`llmux serve --demo` needs nothing but these files."""

    def test_the_catalog_takes_it(self, tmp_path):
        catalog = load(write_demo(tmp_path / "a folder: with 'odd' name"))
        assert {"Tiny-Thinking", "Tiny-Instruct", "Tiny-Other", "tiny-embed"} <= set(catalog.virtual)
        assert catalog.limits.queue_per_model == 512
        for model in catalog.models.values():
            assert model.adapter.check(model.config, runtimes_dir=tmp_path) == ()
