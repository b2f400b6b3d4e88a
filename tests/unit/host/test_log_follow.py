"""`LogReader` on a growing log."""

from __future__ import annotations

from pathlib import Path

from supervisor.host.process.logs import CUT, MOST_BYTES, LogReader


class TestLogFollower:
    """It gives whole lines, each once, even if the file is truncated or replaced."""

    def test_gives_lines_once_they_are_whole(self, tmp_path: Path):
        path = tmp_path / "log"
        follower = LogReader(path)
        assert follower.begin(5) == []
        with path.open("a") as log:
            log.write("one\ntw")
            log.flush()
            assert follower.read() == ["one"]
            log.write("o\n\x1b[31mthree\x1b[0m\n")
            log.flush()
            assert follower.read() == ["two", "three"]
            assert follower.read() == []

    def test_begins_with_the_last_lines(self, tmp_path: Path):
        path = tmp_path / "log"
        path.write_text("".join(f"line {number}\n" for number in range(100_000)))
        assert LogReader(path).begin(2) == ["line 99998", "line 99999"]
        assert all(line.startswith("line ") for line in LogReader(path).begin(1_000_000))

    def test_goes_on_after_a_cut_and_after_a_replacement(self, tmp_path: Path):
        path = tmp_path / "log"
        path.write_text("before\n" * 10)
        follower = LogReader(path)
        follower.begin(0)
        path.write_text("cut\n")
        assert follower.read() == [CUT, "cut"]
        with path.open("a") as log:
            log.write("its last words\nno end of a li")
        path.rename(tmp_path / "log.1")
        path.write_text("another file, longer than the last\n")
        assert follower.read() == ["its last words", "no end of a li", "another file, longer than the last"]

    def test_another_goes_on_where_one_was(self, tmp_path: Path):
        path = tmp_path / "log"
        path.write_text("one\ntw")
        follower = LogReader(path)
        assert follower.begin(9) == ["one"]
        with path.open("a") as log:
            log.write("o\nthree\n")
        second, third = LogReader(path), LogReader(path)
        assert second.resume(follower.position) == ["two", "three"]
        assert third.resume(second.position) == []
        assert LogReader(path).resume(third.position) == []
        path.rename(tmp_path / "log.1")
        path.write_text("four\n")
        last = LogReader(path)
        assert last.resume(follower.position) == ["two", "three", "four"]
        assert last.read() == []
        path.rename(tmp_path / "log.1")
        path.write_text("five\n")
        assert LogReader(path).resume(follower.position) == [CUT, "five"]  # also where it has the first one's inode
        assert LogReader(path).resume("of another program") == [CUT, "five"]

    def test_says_what_it_left_out_of_a_flood(self, tmp_path: Path):
        path = tmp_path / "log"
        path.write_text("begin\n")
        follower = LogReader(path)
        follower.begin(1)
        with path.open("a") as log:
            log.write(("x" * 99 + "\n") * (MOST_BYTES // 50))
        lines = follower.read()
        assert lines[0].endswith("bytes left out]")
        assert len(lines) <= MOST_BYTES // 100 + 2
