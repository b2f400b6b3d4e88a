"""Reading the head of a GGUF file: quick, and never fooled by a broken one."""

from __future__ import annotations

import random
import struct
import time

import gguf as reference
import numpy as np
import pytest

from runtimes.base import ModelUnusableError
from runtimes.llama_server.adapter import gguf_meta
from tests.support import tiny


class TestRead:
    """The result is the same as that of the reference implementation."""

    def test_agrees_with_the_reference_reader(self):
        path = tiny.model(size_mib=10)
        ours, theirs = gguf_meta.read(path), reference.GGUFReader(path)
        assert ours.architecture == "llama"
        assert ours.vocabulary == len(theirs.fields["tokenizer.ggml.tokens"].data)
        for key, value in ours.values.items():
            assert theirs.fields[key].contents() == pytest.approx(value)
        assert ours.file_bytes == path.stat().st_size

    def test_agrees_with_the_reference_writer(self, tmp_path):
        path = tmp_path / "theirs.gguf"
        writer = reference.GGUFWriter(path, "gemma3")
        writer.add_context_length(131072)
        writer.add_array("gemma3.attention.sliding_window_pattern", [True, False, True])
        writer.add_head_count_kv([1, 2, 0])
        writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(1000)])
        writer.add_array("tokenizer.ggml.scores", [0.0] * 1000)
        writer.add_tensor("x", np.zeros(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        metadata = gguf_meta.read(path)
        assert metadata.number("context_length") == 131072
        assert metadata.vocabulary == 1000
        assert metadata.per_layer("attention.sliding_window_pattern", 3) == (1, 0, 1)
        assert metadata.per_layer("attention.head_count_kv", 4) == (1, 2, 0, 0)
        assert metadata.per_layer("context_length", 2) == (131072, 131072)

    def test_a_large_vocabulary_costs_nothing(self, tmp_path):
        path = tmp_path / "large.gguf"
        writer = reference.GGUFWriter(path, "llama")
        writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(200_000)])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        took = []
        for _ in range(5):
            before = time.thread_time()
            assert gguf_meta.read(path).vocabulary == 200_000
            took.append(time.thread_time() - before)
        assert min(took) < 0.01  # walking the strings takes ten times as long

    def test_a_split_model_counts_all_of_its_parts(self, tmp_path):
        for i in (1, 2, 3):
            (tmp_path / f"m-{i:05}-of-00003.gguf").write_bytes(tiny.model().read_bytes())
        first = tmp_path / "m-00001-of-00003.gguf"
        assert gguf_meta.read(first).file_bytes == 3 * tiny.model().stat().st_size
        (tmp_path / "m-00002-of-00003.gguf").unlink()
        with pytest.raises(ModelUnusableError, match=r"m-00002-of-00003\.gguf: there is no such file"):
            gguf_meta.read(first)


class TestBroken:
    """A file that is no model gives one clear error, whatever is in it."""

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "empty"),
            (b"GGU", "begin with GGUF"),
            (b"GGUF", "cut short"),
            (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
            (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "can't be right"),
            (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "architecture"),
            (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "cut short"),
            (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "type 77"),
            (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 40), "cut short"),
        ],
    )
    def test_each_kind(self, tmp_path, content, reason):
        path = tmp_path / "broken.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelUnusableError, match=reason) as error:
            gguf_meta.read(path)
        assert str(path) in str(error.value)

    def test_a_folder(self, tmp_path):
        with pytest.raises(ModelUnusableError, match="directory"):
            gguf_meta.read(tmp_path)

    def test_every_truncation_and_random_damage(self, tmp_path):
        whole = tiny.model().read_bytes()[:4000]
        source = random.Random(7)
        path = tmp_path / "damaged.gguf"
        outcomes = set()
        for i in range(400):
            data = bytearray(whole[: source.randrange(1, len(whole))])
            if i % 2:
                for _ in range(4):
                    data[source.randrange(min(len(data), 600))] = source.randrange(256)
            path.write_bytes(data)
            try:
                gguf_meta.read(path)
                outcomes.add("read")
            except ModelUnusableError:
                outcomes.add("refused")
        assert outcomes == {"read", "refused"}
