"""The progress of a starting worker: its processes, its memory, its log."""

from __future__ import annotations

from supervisor.host.memory.memory import MIB
from supervisor.host.process.progress import Progress, read_progress, stage_share
from tests.support.cases import cases


class TestReadProgress:
    def test_of_nothing(self, tmp_path):
        assert read_progress([], tmp_path / "log") == Progress()

    def test_of_a_real_process(self, spawn, tmp_path):
        log, file = tmp_path / "log", tmp_path / "model.bin"
        log.write_bytes(b"12345")
        file.write_bytes(b"w" * (30 * MIB))
        process = spawn(f"import sys; taken = open({str(file)!r}, 'rb').read(); print(flush=True); sys.stdin.read()")
        process.stdout.readline()
        progress = read_progress([process.pid], log)
        assert progress.log_size == 5
        assert progress.rss >= 30 * MIB
        assert 30 * MIB <= progress.file_bytes < 40 * MIB
        assert progress.bytes_read >= progress.file_bytes

    def test_the_stage_is_the_last_state_of_the_last_line(self, tmp_path):
        log = tmp_path / "log"
        log.write_bytes(b"reading\nLoading shards:  20%|##\rLoading shards:  60%|######    | 3/5")
        progress = read_progress([], log)
        assert (progress.stage, progress.stage_share) == ("Loading shards:  60%|######    | 3/5", 0.6)


class TestStageShare:
    @cases(
        ("line", "share"),
        [
            ("Loading checkpoint shards:  50%|#####     | 1/2 [00:01<00:01]", 0.5),
            ("Loading safetensors checkpoint shards: 100% Completed | 4/4", 1.0),
            ("loaded 7.5 % of the weights", 0.07),
            ("GPU KV cache usage: 98.0%, prefix cache hit rate: 12%", None),
            ("." * 37, 0.37),
            ("." * 120, 1.0),
            ("progress 250%", 1.0),
            ("...", 0.03),
            ("load_tensors: offloading 33 layers to GPU", None),
            (".", None),
            ("", None),
        ],
    )
    def test_of_a_line(self, line, share):
        assert stage_share(line) == share
