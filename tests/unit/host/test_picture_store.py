"""Pictures that are kept for their addresses: bounded by bytes and age, found by their names alone."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from supervisor.host.store.picture_store import Kept, PictureStore
from supervisor.host.store.store import NotSavedError


@pytest.fixture
def store(tmp_path) -> PictureStore:
    return opened(tmp_path)


def opened(folder: Path, *, most_bytes: int = 100, keep_s: float = 60.0) -> PictureStore:
    store = PictureStore()
    store.configure(most_bytes=most_bytes, keep_s=keep_s)
    store.open(folder)
    return store


def keep(store: PictureStore, data: bytes, kind: str) -> str:
    (name,) = store.keep([(data, kind)])
    return name


def age(kept: Kept | None, seconds: float) -> None:
    assert kept is not None
    at = time.time() - seconds
    os.utime(kept.path, (at, at))


class TestKeeping:
    """A kept picture is found by its name only."""

    def test_it_is_found_by_a_name_that_cannot_be_guessed(self, store):
        one, other = keep(store, b"one", "png"), keep(store, b"other", "webp")
        assert store.find(one).path.read_bytes() == b"one"
        assert store.find(other).path.suffix == ".webp"
        assert one[:43] != other[:43]
        assert stat.S_IMODE(store.find(one).path.stat().st_mode) == 0o600

    @pytest.mark.parametrize("name", ["", ".", "..", "../pictures", "a.png", "a" * 43, "a" * 43 + ".svg"])
    def test_other_names_find_nothing(self, store, name):
        assert store.find(name) is None

    def test_the_next_daemon_finds_it(self, store, tmp_path):
        assert opened(tmp_path).find(keep(store, b"one", "png")) is not None

    def test_a_half_written_one_is_removed(self, store, tmp_path):
        left = tmp_path / "pictures" / "half.png.new"
        left.touch()
        opened(tmp_path)
        assert not left.exists()

    def test_one_larger_than_all_is_refused(self, store):
        with pytest.raises(NotSavedError, match="pictures_mib"):
            keep(store, bytes(101), "png")

    def test_none_of_an_answer_goes_for_another_of_it(self, store):
        older = keep(store, bytes(40), "png")
        with pytest.raises(NotSavedError, match="ask for fewer"):
            store.keep([(bytes(40), "png")] * 3)
        assert store.find(older) is not None
        names = store.keep([(bytes(40), "png")] * 2)
        assert all(store.find(name) for name in names)
        assert store.find(older) is None

    def test_without_room_nothing_is_kept(self, tmp_path):
        assert not opened(tmp_path, most_bytes=0).is_on
        assert not PictureStore().is_on


class TestGoing:
    """The oldest make room for the newest, and each expires in time."""

    def test_the_oldest_go_first(self, store):
        names = [keep(store, bytes(40), "png")]
        age(store.find(names[0]), 20)
        names.append(keep(store, bytes(40), "png"))
        age(store.find(names[1]), 10)
        names.append(keep(store, bytes(40), "png"))
        assert [store.find(name) is not None for name in names] == [False, True, True]

    def test_what_is_left_of_its_time_is_known(self, store):
        one = keep(store, b"one", "png")
        age(store.find(one), 20)
        assert 0 < store.find(one).left_s <= 40
        store.configure(most_bytes=100, keep_s=30)
        assert 0 < store.find(one).left_s <= 10

    def test_each_goes_at_its_time(self, store, tmp_path):
        old, young = keep(store, b"old", "png"), keep(store, b"young", "png")
        age(store.find(old), 61)
        assert store.find(old) is None
        store.expire()
        assert [path.name for path in (tmp_path / "pictures").iterdir()] == [young]

    def test_all_go_at_the_end(self, store, tmp_path):
        keep(store, b"one", "png")
        store.clear()
        assert not [*(tmp_path / "pictures").iterdir()]
