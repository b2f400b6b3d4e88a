from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from supervisor.host.store import store as store_module
from supervisor.host.store.store import Footprints, NotSavedError, Store, learned_footprints
from tests.support.limits import LIMIT_S

REPOSITORY = Path(__file__).parents[3]


async def filled(path, footprints=40):
    """A cache and a state with the same content."""
    cache, state = await Footprints.open(path), await Store.open(state_of(path))
    async with state.transaction() as changes:
        for number in range(footprints):
            name = f"definition-{number:04d}" * 8
            await cache.learn(name, "GPU-a", 1000 + number)
            changes["things", name] = {"mib": 1000 + number}
    await cache.close()
    await state.close()
    return cache.learned(), state.items("things")


async def change(state, changes):
    async with state.transaction() as made:
        made |= changes


def state_of(path):
    return path.with_name(f"{path.name}-state")


def broken(path):
    return sorted(path.parent.glob(f"{path.name}*.broken-*"))


def former_state(path, jobs):
    """A file of the third schema with so many jobs."""
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        file.executescript("; ".join((*store_module.MIGRATIONS[:3], "PRAGMA user_version = 3")))
        rows = (("jobs", f"job_{number}", json.dumps({"id": f"job_{number}"})) for number in range(jobs))
        file.executemany("INSERT INTO entries VALUES (?, ?, ?)", rows)
        file.execute("INSERT INTO entries VALUES ('store', 'began', '1.5')")


def rows_of(path):
    """The schema's number, and all rows."""
    with contextlib.closing(sqlite3.connect(path)) as file:
        (version,) = file.execute("PRAGMA user_version").fetchone()
        return version, file.execute("SELECT * FROM entries").fetchall()


def run(code, *argv):
    """Run `code` in a process of its own; its output."""
    prelude = "import asyncio, os, random, resource, signal, sqlite3, sys\nfrom pathlib import Path\nfrom supervisor.host.store import store\nfrom supervisor.host.store.store import *\n"
    command = [sys.executable, "-c", prelude + code, *map(str, argv)]
    return subprocess.run(
        command, cwd=REPOSITORY, check=True, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True
    ).stdout


class TestRemembering:
    """A restart keeps footprints and values."""

    async def test_footprints_by_definition_and_device(self, tmp_path):
        path = tmp_path / "state" / "llmux.db"
        store = await Footprints.open(path)
        assert (store.learned(), store.trouble) == ({}, None)
        await store.learn("d", "gpu", 100)
        await store.learn("d", "host", 200)
        await store.learn("d", "gpu", 150)
        expected = {("d", "gpu"): 150, ("d", "host"): 200}
        assert store.learned() == expected
        await store.close()
        again = await Footprints.open(path)
        assert again.learned() == expected
        await again.close()

    async def test_load_times_beside_the_footprints(self, tmp_path):
        path = tmp_path / "db"
        store = await Footprints.open(path)
        await store.learn("d", "host", 200)
        await store.learn_load("d", 3.0)
        await store.learn_load("d", 4.5)
        await store.learn_load("instant", 0.0)
        await store.learn("d", "host", 250, raised=True)
        assert (
            learned_footprints(path)
            == (store.learned(), store.raised())
            == ({("d", "host"): 200}, {("d", "host"): 250})
        )
        await store.close()
        again = await Footprints.open(path)
        assert (again.load_times(), again.learned()) == ({"d": 4.5, "instant": 0.001}, {("d", "host"): 200})
        assert again.raised() == {("d", "host"): 250}
        await again.close()

    async def test_files_are_the_users_alone(self, tmp_path):
        await filled(tmp_path / "db", footprints=1)
        store = await Store.open(tmp_path / "db-state")
        await store.put("a", "b", 1)
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        await store.close()
        assert modes == dict.fromkeys(("db", "db-state", "db-state-wal", "db-state.backup"), 0o600)

    async def test_collections_of_values(self, tmp_path):
        state = await Store.open(tmp_path / "db")
        await state.put("tasks", "a", [1, {"b": "ü"}])
        await state.put("tasks", "a", "text")
        await state.put("tasks", "gone", True)  # a value
        await state.put("nonces", "a", 7.5)
        await state.put("tasks", "gone", None)
        await state.put("tasks", "never there", None)
        await state.close()
        again = await Store.open(tmp_path / "db")
        assert again.items("tasks") == {"a": "text"}
        assert again.items("nonces") == {"a": 7.5}
        assert (again.get("nonces", "a"), again.get("nonces", "b"), again.items("none")) == (7.5, None, {})
        await again.close()

    async def test_a_transaction_is_made_whole_or_not_at_all(self, tmp_path):
        state = await Store.open(tmp_path / "db")
        await state.put("a", "old", 1)
        with pytest.raises(ZeroDivisionError):
            async with state.transaction() as changes:
                changes["a", "new"] = 1 / 0
        with pytest.raises(NotSavedError):  # SQLite refuses the second: no text
            await change(state, {("a", "old"): None, ("a", b"bytes"): 2})
        assert state.items("a") == {"old": 1}
        await change(state, {("a", "old"): None, ("a", "new"): 2})
        assert state.items("a") == {"new": 2}
        await state.close()
        again = await Store.open(tmp_path / "db")
        assert again.items("a") == {"new": 2}
        await again.close()

    async def test_a_change_is_seen_only_once_it_is_on_disk(self, tmp_path):
        state = await Store.open(tmp_path / "db")
        await change(state, {("a", "old"): 1, ("a", "other"): 3})
        goes_on = threading.Event()
        blocking = asyncio.create_task(state.run(lambda _file: goes_on.wait(LIMIT_S)))
        changing = asyncio.create_task(change(state, {("a", "old"): None, ("a", "new"): 2}))
        await asyncio.sleep(0.05)
        assert state.items("a") == {"old": 1, "other": 3}
        goes_on.set()
        await asyncio.gather(blocking, changing)
        assert state.items("a") == {"new": 2, "other": 3}
        await state.close()

    async def test_what_was_got_is_ones_own(self, tmp_path):
        state = await Store.open(tmp_path / "db")
        await state.put("a", "b", [1])
        state.get("a", "b").append(2)
        assert state.get("a", "b") == [1]
        await state.close()

    async def test_a_cancelled_caller_leaves_a_whole_store(self, tmp_path):
        cache, state = await Footprints.open(tmp_path / "db"), await Store.open(tmp_path / "state")
        for number in range(30):
            for work in (cache.learn("d", "gpu", number), state.put("a", "b", number)):
                doing = asyncio.create_task(work)
                await asyncio.sleep(0)
                doing.cancel()
        await cache.learn("d", "gpu", 77)
        await state.put("a", "last", 1)
        assert state.items("a") == {"b": 29, "last": 1}
        await cache.close()
        await state.close()
        cache, state = await Footprints.open(tmp_path / "db"), await Store.open(tmp_path / "state")
        assert cache.learned() == {("d", "gpu"): 77}
        assert state.items("a") == {"b": 29, "last": 1}
        await cache.close()
        await state.close()

    async def test_after_closing_nothing_is_saved(self, tmp_path):
        store = await Store.open(tmp_path / "db")
        await store.close()
        with pytest.raises(NotSavedError):
            await store.put("a", "b", 1)


class TestSchema:
    """Files of older versions are migrated; those of newer ones are left alone."""

    async def test_footprints_of_the_first_schema_are_kept(self, tmp_path):
        with sqlite3.connect(tmp_path / "db") as file:
            file.executescript("""
                CREATE TABLE footprints (
                    definition TEXT NOT NULL,
                    device TEXT NOT NULL,
                    mib INTEGER NOT NULL CHECK (mib BETWEEN 0 AND 1 << 30),
                    samples INTEGER NOT NULL CHECK (samples > 0),
                    updated_at REAL NOT NULL,
                    PRIMARY KEY (definition, device)
                ) STRICT, WITHOUT ROWID;
                CREATE TABLE settings (
                    name TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL, updated_at REAL NOT NULL
                ) STRICT, WITHOUT ROWID;
                INSERT INTO footprints VALUES ('{"path": "/m"}', 'GPU-a', 1200, 3, 1.5), ('d', 'host', 7, 1, 1.5);
                PRAGMA user_version = 1;
            """)
        file.close()
        for _ in range(2):
            store = await Footprints.open(tmp_path / "db")
            assert (store.learned(), store.trouble) == ({('{"path": "/m"}', "GPU-a"): 1200, ("d", "host"): 7}, None)
            await store.close()
        assert not broken(tmp_path / "db")

    async def test_a_newer_file_is_left_alone(self, tmp_path):
        await filled(tmp_path / "db")
        with sqlite3.connect(tmp_path / "db") as file:
            file.execute("PRAGMA user_version = 99")
        file.close()
        before = (tmp_path / "db").read_bytes()
        store = await Footprints.open(tmp_path / "db")
        assert "newer" in store.trouble
        await store.learn("d", "gpu", 5)
        assert store.learned() == {("d", "gpu"): 5}
        await store.close()
        assert (tmp_path / "db").read_bytes() == before


class TestPending:
    """A successor changes nothing before its predecessor can't take the file back any more."""

    async def test_nothing_is_changed_before_it_is_settled(self, tmp_path):
        path = tmp_path / "db"
        former_state(path, 3)
        before, names = rows_of(path), {*tmp_path.iterdir()}
        successor = await Store.open(path, pending=True)
        await successor.put("a", "b", 1)
        assert len(successor.items("jobs")) == 3
        assert await successor.run(lambda file: file.execute("SELECT value FROM entries WHERE key = 'b'").fetchall())
        await successor.close()
        assert (rows_of(path), {*tmp_path.iterdir()}) == (before, names)

    async def test_then_each_change_is_made_at_once(self, tmp_path):
        path = tmp_path / "db"
        former_state(path, 3)
        successor = await Store.open(path, pending=True)
        await successor.put("a", "early", 1)
        await successor.settle()
        await successor.settle()
        await successor.put("a", "late", 2)
        (tmp_path / "killed").mkdir()
        for name in ("db", "db-wal"):
            shutil.copy(tmp_path / name, tmp_path / "killed")
        await successor.close()
        assert rows_of(tmp_path / "killed/db") == rows_of(path) == rows_of(tmp_path / "db.backup")
        again = await Store.open(path)
        assert (again.items("a"), len(again.items("jobs"))) == ({"early": 1, "late": 2}, 3)
        await again.close()

    async def test_a_change_is_made_whole_or_not_at_all(self, tmp_path):
        successor = await Store.open(tmp_path / "db", pending=True)
        await successor.put("a", "old", 1)
        with pytest.raises(NotSavedError):
            await change(successor, {("a", "old"): None, ("a", b"bytes"): 2})
        assert successor.items("a") == {"old": 1}
        await successor.settle()
        await successor.close()
        again = await Store.open(tmp_path / "db")
        assert again.items("a") == {"old": 1}
        await again.close()

    def test_without_room_for_what_changed_it_goes_on_once_there_is_some(self, tmp_path):
        """A file of this schema can be used as it is."""
        run(
            """
async def main():
    path = Path(sys.argv[1])
    state = await Store.open(path)
    await state.put("a", "old", 1)
    await state.close()
    state = await Store.open(path, pending=True)
    await state.put("a", "lost", "x" * 100_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    await state.settle()
    try:
        await state.put("a", "refused", 2)
        os._exit(1)
    except NotSavedError:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await state.put("a", "new", 3)
    assert state.items("a") == {"old": 1, "new": 3}, state.items("a")
    os._exit(0)
asyncio.run(main())
os._exit(1)
""",
            tmp_path / "db",
        )

    def test_without_room_nothing_is_changed(self, tmp_path):
        """Neither then nor later in that run: the data in memory doesn't have the older schema."""
        path = tmp_path / "db"
        former_state(path, 2000)
        before = rows_of(path)
        run(
            """
async def main():
    state = await Store.open(Path(sys.argv[1]), pending=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    await state.settle()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert state.trouble
    try:
        await state.put("a", "b", 1)
    except NotSavedError:
        os._exit(0)
asyncio.run(main())
os._exit(1)
""",
            path,
        )
        assert rows_of(path) == before


class TestAnUnusableFile:
    """Where the file can't be used now, it is left alone and nothing is saved."""

    async def test_another_daemon_has_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr(store_module, "BUSY_S", 0.1)
        first = await Store.open(tmp_path / "db")
        second = await Store.open(tmp_path / "db")
        assert "locked" in second.trouble
        with pytest.raises(NotSavedError, match="locked"):
            await second.put("a", "b", 1)
        await second.close()
        await first.put("a", "b", 9)
        await first.close()
        assert not broken(tmp_path / "db")

    async def test_the_folder_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        store = await Footprints.open(tmp_path / "file" / "db")
        assert store.trouble
        await store.learn("d", "gpu", 5)
        assert store.learned() == {("d", "gpu"): 5}
        await store.close()


GARBAGE = (b"", b"\0" * 9000, b"not a database" * 1000, b"SQLite format 3\0")


class TestADamagedCache:
    """Fault 22: the file is kept aside, and the cache begins empty."""

    async def check(self, path, *allowed):
        store = await Footprints.open(path)
        assert store.trouble is None
        assert store.learned() in allowed
        await store.learn("new", "gpu", 5)
        await store.close()
        again = await Footprints.open(path)
        assert again.learned() == {**store.learned(), ("new", "gpu"): 5}
        await again.close()

    @pytest.mark.parametrize("garbage", GARBAGE[1:])
    async def test_garbage(self, tmp_path, garbage):
        await filled(tmp_path / "db")
        (tmp_path / "db").write_bytes(garbage)
        await self.check(tmp_path / "db", {})
        assert [path.read_bytes() for path in broken(tmp_path / "db")] == [garbage]

    async def test_truncated_anywhere(self, tmp_path):
        await filled(tmp_path / "sound")
        whole = (tmp_path / "sound").read_bytes()
        for number in range(24):
            path = tmp_path / str(number) / "db"
            path.parent.mkdir()
            path.write_bytes(whole[: len(whole) * number // 24])
            await self.check(path, {})

    async def test_it_is_said_once(self, tmp_path):
        (tmp_path / "db").write_bytes(b"garbage" * 1000)
        with capture_logs() as told:
            for _ in range(2):
                store = await Footprints.open(tmp_path / "db")
                await store.close()
        (line,) = told
        assert (line["event"], line["kept"]) == ("store.damaged", str(*broken(tmp_path / "db")))


class TestADamagedState:
    """Fault 22: the file is kept aside, and its backup takes its place."""

    async def check(self, path, expected):
        state = await Store.open(path)
        assert state.trouble is None
        assert state.items("things") == expected
        await state.put("things", "new", 5)
        await state.close()
        again = await Store.open(path)
        assert again.items("things") == {**expected, "new": 5}
        await again.close()

    @pytest.mark.parametrize("garbage", GARBAGE)
    async def test_garbage_is_replaced_by_the_backup(self, tmp_path, garbage):
        _, things = await filled(tmp_path / "db")
        path = state_of(tmp_path / "db")
        path.write_bytes(garbage)
        await self.check(path, things)
        assert [kept.read_bytes() for kept in broken(path)] == [garbage] * bool(garbage)

    async def test_a_lost_file_is_replaced_by_the_backup(self, tmp_path):
        _, things = await filled(tmp_path / "db")
        state_of(tmp_path / "db").unlink()
        await self.check(state_of(tmp_path / "db"), things)

    async def test_without_a_good_backup_it_begins_empty_and_keeps_both(self, tmp_path):
        await filled(tmp_path / "db")
        path = state_of(tmp_path / "db")
        for name in (path.name, f"{path.name}.backup"):
            (tmp_path / name).write_bytes(b"garbage" * 1000)
        await self.check(path, {})
        assert [kept.name.partition(".broken-")[0] for kept in broken(path)] == [f"{path.name}.backup", path.name]

    @pytest.mark.parametrize("value", ["[" * 100_000, "0", "9" * 30, "-5", "1.5", '"x"'])
    async def test_figures_that_cannot_be(self, tmp_path, value):
        path = tmp_path / "llmux.sqlite3"
        await filled(path, 1)
        store = await Footprints.open(path)
        await store.learn_load("d", 3.0)
        await store.close()
        with contextlib.closing(sqlite3.connect(path)) as file, file:
            file.execute("UPDATE entries SET value = ?", (value,))
        cache = await Footprints.open(path)
        assert (cache.learned(), cache.load_times()) == ({}, {})
        await cache.close()

    async def test_values_that_are_no_json(self, tmp_path):
        _, things = await filled(tmp_path / "db")
        path = state_of(tmp_path / "db")
        with sqlite3.connect(path) as file:
            file.execute("UPDATE entries SET value = '{' WHERE key = (SELECT max(key) FROM entries)")
        file.close()
        await self.check(path, things)

    async def test_garbled_anywhere_it_starts_and_tells_nothing_impossible(self, tmp_path):
        learned, things = await filled(tmp_path / "sound")
        seed = random.randrange(10**9)
        print("seed", seed)
        dice = random.Random(seed)
        for number in range(30):
            path = tmp_path / str(number) / "db"
            path.parent.mkdir()
            shutil.copy(f"{state_of(tmp_path / 'sound')}.backup", f"{state_of(path)}.backup")
            for source, target in ((tmp_path / "sound", path), (state_of(tmp_path / "sound"), state_of(path))):
                torn = bytearray(source.read_bytes())
                whole = len(torn)
                start = dice.choice([dice.randrange(100), dice.randrange(whole)])
                torn[start : start + 64] = dice.randbytes(64)
                target.write_bytes(torn[:whole])
            cache, state = await Footprints.open(path), await Store.open(state_of(path))
            assert all(type(mib) is int for mib in cache.learned().values())
            if broken(path):
                assert cache.learned() in ({}, learned)
            if broken(state_of(path)):
                assert state.items("things") == things
            await cache.learn("new", "gpu", 5)
            await state.put("things", "new", 5)
            await cache.close()
            await state.close()

    async def test_the_backup_is_made_anew_while_running_but_not_for_each_change(self, tmp_path, monkeypatch):
        path = tmp_path / "db"
        state = await Store.open(path)
        backup = tmp_path / "db.backup"
        first = backup.stat().st_ino
        await state.put("a", "b", 1)
        assert backup.stat().st_ino == first
        monkeypatch.setattr(store_module, "BACKUP_S", 0.0)
        await state.put("a", "b", 2)
        await state.put("a", "b", 3)  # in the same thread, after the backup
        with sqlite3.connect(backup) as file:
            assert file.execute("SELECT value FROM entries WHERE key = 'b'").fetchall() in ([("2",)], [("3",)])
        file.close()
        await state.close()


class TestKilled:
    """A daemon killed at any moment finds all saved changes at its next start, and transactions are whole."""

    def test_while_writing(self, tmp_path):
        out = run(
            """
store.BACKUP_S = 0.0  # after each change
path = Path(sys.argv[1])
async def writer(pipe):
    cache, state = await Footprints.open(path), await Store.open(Path(f"{path}-state"))
    n = cache.learned().get(("d", "gpu"), 0)
    while True:
        n += 1
        await cache.learn("d", "gpu", n)
        async with state.transaction() as changes:
            changes["a", "n"] = n
            changes["b", "n"] = {"twice": 2 * n}
        os.write(pipe, b"%d\\n" % n)
async def reader():
    cache, state = await Footprints.open(path), await Store.open(Path(f"{path}-state"))
    assert cache.trouble is None and state.trouble is None
    await cache.close()
    await state.close()
    return cache.learned().get(("d", "gpu"), 0), state.get("a", "n") or 0, (state.get("b", "n") or {"twice": 0})["twice"]
for _ in range(25):
    ours, theirs = os.pipe()
    if not (pid := os.fork()):
        asyncio.run(writer(theirs))
    os.close(theirs)
    with open(ours) as pipe:
        pipe.readline()
        asyncio.run(asyncio.sleep(random.random() * 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        told = [int(line) for line in pipe if line.endswith("\\n")]
    learned, once, twice = asyncio.run(reader())
    assert learned >= once >= (told[-1] if told else 1), (learned, once, told[-1:])
    assert twice == 2 * once
print(learned, [p.name for p in path.parent.glob("*broken*")])
""",
            tmp_path / "db",
        )
        assert out.endswith(" []\n")

    async def test_while_migrating(self, tmp_path):
        """The file has the old schema with the old rows, or the new one with the new, and is sound."""
        former_state(tmp_path / "former", 1000)
        out = run(
            """
import contextlib, shutil, time
folder, given = Path(sys.argv[1]), Path(sys.argv[2])
path, connect = folder / "state.sqlite3", sqlite3.connect

def rows(file):
    with contextlib.closing(connect(file)) as opened:
        (version,) = opened.execute("PRAGMA user_version").fetchone()
        return version, opened.execute("SELECT * FROM entries WHERE collection <> 'store'").fetchall()

def copied():
    for left in folder.glob("state*"):
        left.unlink()
    shutil.copy(given, path)

def counted(end):
    "Connections whose `end`th step is the process's last."
    taken = [0]
    def step():
        taken[0] += 1
        if taken[0] == end:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0
    def counting(*args, **keys):
        file = connect(*args, **keys)
        file.set_progress_handler(step, 1000)
        return file
    sqlite3.connect = counting
    return taken

async def opened(pending=False):
    state = await Store.open(path, pending=pending)
    assert state.trouble is None, state.trouble
    return state

copied()
old = rows(path)
taken, began = counted(0), time.monotonic()
state = asyncio.run(opened())
took_s, steps = time.monotonic() - began, taken[0]
sqlite3.connect = connect
asyncio.run(state.close())
new = rows(path)
assert (old[0], new[0], len(new[1])) == (3, len(MIGRATIONS), len(old[1]))
found = []
for number in range(30):
    copied()
    if not (pid := os.fork()):
        if number % 2:
            counted(random.randrange(1, steps))
        asyncio.run(opened(pending=number % 3 == 0))
        os._exit(0)
    if not number % 2:
        time.sleep(random.random() * took_s * 1.5)
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    shutil.copytree(folder, folder / "seen", dirs_exist_ok=True, ignore=lambda *_: ["seen", "former"])
    left = rows(folder / "seen" / path.name)
    shutil.rmtree(folder / "seen")
    assert left in (old, new), (left[0], number)
    assert number % 3 or left == old, "it was not certain yet"
    found.append(left[0])
    state = asyncio.run(opened())
    asyncio.run(state.close())
    assert rows(path) == new
    assert not [*folder.glob("*broken*")]
print(3 in found, "steps", steps, "killed before its end", found.count(3))
""",
            tmp_path,
            tmp_path / "former",
        )
        print(out)
        assert out.startswith("True"), out

    async def test_while_restoring(self, tmp_path):
        _, things = await filled(tmp_path / "db")
        out = run(
            """
path, expected = Path(sys.argv[1]), int(sys.argv[2])
os.close(2)  # its warnings are expected
os.open(os.devnull, os.O_WRONLY)
for _ in range(50):
    path.write_bytes(b"garbage" * 1000)
    if not (pid := os.fork()):
        asyncio.run(Store.open(path))
        os._exit(0)
    asyncio.run(asyncio.sleep(random.random() * 0.03))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    state = asyncio.run(Store.open(path))
    assert (state.trouble, len(state.items("things"))) == (None, expected)
    asyncio.run(state.close())
print("done")
""",
            state_of(tmp_path / "db"),
            len(things),
        )
        assert out.endswith("done\n")


class TestAFullDisk:
    """Fault 21: saved changes stay, a failure to save is a warning, and saving goes on when there is room again."""

    async def test_while_running(self, tmp_path):
        learned, things = await filled(tmp_path / "db")
        run(
            """
async def main():
    cache, state = await Footprints.open(Path(sys.argv[1])), await Store.open(Path(sys.argv[1] + "-state"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    before, items = cache.learned(), state.items("things")
    await cache.learn("new", "gpu", 5)
    assert cache.trouble and cache.learned() == {**before, ("new", "gpu"): 5}
    try:
        await state.put("things", "new", 5)
    except NotSavedError as error:
        assert state.items("things") == items and error.status == 507
    else:
        raise AssertionError("put() claims to have saved it")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await cache.learn("later", "gpu", 6)
    await state.put("things", "later", 6)
    assert cache.trouble is None and state.trouble is None
    os._exit(0)  # not even closed
asyncio.run(main())
""",
            tmp_path / "db",
        )
        cache, state = await Footprints.open(tmp_path / "db"), await Store.open(state_of(tmp_path / "db"))
        assert cache.learned() == {**learned, ("later", "gpu"): 6}
        assert state.items("things") == {**things, "later": 6}
        await cache.close()
        await state.close()

    async def test_from_the_start(self, tmp_path):
        learned, things = await filled(tmp_path / "db")
        run(
            """
async def main():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    cache, state = await Footprints.open(Path(sys.argv[1])), await Store.open(Path(sys.argv[1] + "-state"))
    await cache.learn("new", "gpu", 5)
    assert cache.learned()["new", "gpu"] == 5
    await cache.close()
    await state.close()
asyncio.run(main())
""",
            tmp_path / "db",
        )
        assert not list(tmp_path.glob("*broken*"))
        cache, state = await Footprints.open(tmp_path / "db"), await Store.open(state_of(tmp_path / "db"))
        assert (cache.learned(), state.items("things")) == (learned, things)
        await cache.close()
        await state.close()
