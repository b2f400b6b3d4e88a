"""A file of known size and hash arrives complete and correct, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from supervisor.errors import LlmuxError
from supervisor.host.hub import download
from supervisor.host.hub.download import File, Origin
from tests.support.cases import cases

CONTENT = b"all of it!"
FILE = File("deep/weights", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@dataclass
class Answer:
    """The chunks of a body, one after the other; an exception among these is raised."""

    status_code: int
    chunks: tuple[bytes | Exception, ...] = ()

    def iter_bytes(self):
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk


class RefusedError(OSError):
    """As the hub's client raises it: it has the response."""

    def __init__(self, response: Answer) -> None:
        super().__init__(f"answers {response.status_code}\nand some advice")
        self.response = response


class Download:
    """A download from a server that gives the next answer at each request, the last one again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stop = threading.Event()
        self.ranges: list[str | None] = []
        self.said: list[str] = []
        self.sizes: list[int] = []

    def __call__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        origin = Origin(self.ask, (503,), lambda error: LlmuxError(f"explained: {download.line_of(error)}"))
        fill = lambda part: download.resume(FILE, part, origin, self.said.append, self.stop, self.came)
        wrong = LlmuxError("the words of its caller")
        assert download.fetch(FILE, self.folder, fill, wrong, self.said.append).read_bytes() == CONTENT

    def came(self, size: int) -> None:
        self.sizes.append(size)

    @contextlib.contextmanager
    def ask(self, headers):
        assert headers["Accept-Encoding"] == "identity", "else other bytes would come than the file has"
        self.ranges.append(headers.get("Range"))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer.status_code >= 400:
            raise RefusedError(answer)
        yield answer


@pytest.fixture
def get(tmp_path, monkeypatch) -> Download:
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0)
    return Download(tmp_path)


@pytest.fixture
def part(tmp_path):
    found = FILE.part(tmp_path)
    found.parent.mkdir()
    return found


class TestFile:
    """The length of the digest shows its algorithm."""

    @cases("digest", [hashlib.sha256(CONTENT).hexdigest(), hashlib.sha1(b"blob 10\0" + CONTENT).hexdigest()])
    def test_content(self, tmp_path, digest):
        (tmp_path / "file").write_bytes(CONTENT)
        assert File("file", 10, digest).is_of(tmp_path / "file")
        for other in (b"all of it?", b"all of it", b"all of it!!"):
            (tmp_path / "file").write_bytes(other)
            assert not File("file", 10, digest).is_of(tmp_path / "file")


class TestGoingOn:
    """An attempt requests the missing bytes."""

    def test_where_the_line_broke(self, get):
        broken = Answer(200, (b"all", ValueError("broke\nand some advice")))
        get(broken, Answer(206, (b" of",)), Answer(206, (b" it!",)))
        assert get.ranges == [None, "bytes=3-", "bytes=6-"]
        assert get.said == [
            "deep/weights: broken off at 3 of 10 bytes (broke); going on",
            "deep/weights: broken off at 6 of 10 bytes (the answer ended early); going on",
        ]
        assert get.sizes == [3, 6, 10]

    @cases(
        ("there", "answer", "asked"),
        [
            (b"all", Answer(206, (b" of it!",)), ["bytes=3-"]),
            (b"ALL", Answer(200, (CONTENT,)), ["bytes=3-"]),
            (CONTENT, Answer(404), []),
            (CONTENT + b"!", Answer(200, (CONTENT,)), [None]),
        ],
    )
    def test_from_an_earlier_part(self, get, part, there, answer, asked):
        """Where the server ignores the range, or the part is longer than the file, it begins anew."""
        get.ranges.clear()
        part.write_bytes(there)
        get(answer)
        assert (get.ranges, get.said) == (asked, [])
        assert not part.exists()

    def test_parts_of_other_content_go(self, get, part):
        part.with_name(f"weights.{'0' * 12}.part").write_bytes(b"x")
        get(Answer(200, (CONTENT,)))
        assert [file.name for file in part.parent.iterdir()] == ["weights"]


class TestBounds:
    """No more than the file's size is read, and wrong content is never put in place."""

    def test_the_rest_is_not_read(self, get):
        get(Answer(200, (CONTENT + b" And", b" more")))
        assert get.sizes == [len(CONTENT)]

    def test_the_first_bytes_of_an_answer(self):
        answer = Answer(200, (b"abc", b"def", AssertionError("read on")))
        assert [download.read_up_to(answer, size) for size in (2, 3, 5, 6)] == [b"ab", b"abc", b"abcde", b"abcdef"]

    def test_another_hash_once(self, get):
        get(Answer(200, (b"all of it?",)), Answer(200, (CONTENT,)))
        assert get.ranges == [None, None]
        assert get.said == ["deep/weights: arrived with another hash than it must have; once more"]

    def test_another_hash_twice(self, get, part):
        with pytest.raises(LlmuxError, match="the words of its caller"):
            get(Answer(200, (b"all of it?",)))
        assert len(get.ranges) == 2
        assert list(part.parent.iterdir()) == []


class TestGivingUp:
    """After attempts in a row without a byte, or at once where the status says that another is useless."""

    @cases(
        ("answer", "attempts", "told"),
        [
            (Answer(404), 1, "answers 404"),
            (Answer(503), download.ATTEMPTS, "answers 503"),
            (Answer(206), download.ATTEMPTS, "the answer ended early"),
            (Answer(206, (ValueError(),)), download.ATTEMPTS, "ValueError"),
        ],
    )
    def test_keeps_what_has_come(self, get, part, answer, attempts, told):
        get.ranges.clear()
        part.write_bytes(b"all")
        with pytest.raises(LlmuxError, match=f"^explained: {told}$"):
            get(answer)
        assert len(get.ranges) == attempts
        assert part.read_bytes() == b"all"

    def test_a_byte_is_worth_as_many_again(self, get):
        few = [Answer(503)] * (download.ATTEMPTS - 1)
        get(*few, Answer(200, (b"all",)), *few, Answer(206, (b" of it!",)))
        assert len(get.ranges) == 2 * download.ATTEMPTS

    def test_an_error_of_the_disk_is_not_the_servers(self, get):
        with pytest.raises(OSError, match="full"):
            get(Answer(200, (OSError("full"),)))
        assert len(get.ranges) == 1


class TestStopped:
    """At the next chunk, or in a pause; received bytes stay."""

    @cases("chunks", [(b"all", b" of it!"), (b"all",)])
    def test_soon(self, get, part, monkeypatch, chunks):
        monkeypatch.setattr(download, "FIRST_PAUSE_S", 3600)
        part.unlink(missing_ok=True)
        get.stop.clear()
        get.came = lambda _size: get.stop.set()
        with pytest.raises(InterruptedError):
            get(Answer(200, chunks))
        assert part.read_bytes() == b"all"
