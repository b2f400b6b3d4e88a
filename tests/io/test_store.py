from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.io import store as store_module
from supervisor.io.store import NotSavedError, Store
from tests.limits import LIMIT_S

REPOSITORY = Path(__file__).parents[2]


async def filled(path, footprints=40):
    store = await Store.open(path)
    for number in range(footprints):
        await store.learn(f"definition-{number:04d}" * 8, "GPU-a", 1000 + number)
    await store.put("log_level", "debug")
    await store.close()
    store = await Store.open(path)  # a good start makes the backup
    await store.close()
    return store.learned()


def run(code, *argv):
    """Run `code` in a process of its own; its output."""
    prelude = "import asyncio, os, random, resource, signal, sys\nfrom pathlib import Path\nfrom supervisor.io.store import *\n"
    command = [sys.executable, "-c", prelude + code, *map(str, argv)]
    return subprocess.run(
        command, cwd=REPOSITORY, check=True, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True
    ).stdout


class TestRemembering:
    """What was learned and set is there after a restart."""

    async def test_footprints_by_definition_and_device(self, tmp_path):
        path = tmp_path / "state" / "llmux.db"
        store = await Store.open(path)
        assert (store.learned(), store.trouble) == ({}, None)
        await store.learn("d", "gpu", 100)
        await store.learn("d", "host", 200)
        await store.learn("d", "gpu", 150)
        expected = {("d", "gpu"): 150, ("d", "host"): 200}
        assert store.learned() == expected
        await store.close()
        again = await Store.open(path)
        assert again.learned() == expected
        await again.close()
        with sqlite3.connect(path) as file:
            assert file.execute("SELECT samples FROM footprints ORDER BY device").fetchall() == [(2,), (1,)]
        file.close()

    async def test_files_are_the_users_alone(self, tmp_path):
        await filled(tmp_path / "db", footprints=1)
        store = await Store.open(tmp_path / "db")
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        await store.close()
        assert {"db", "db.backup"} <= modes.keys()
        assert set(modes.values()) == {0o600}

    async def test_settings(self, tmp_path):
        store = await Store.open(tmp_path / "db")
        await store.put("a", "1")
        await store.put("b", "x")
        await store.put("a", "2")
        await store.put("b", None)
        await store.close()
        again = await Store.open(tmp_path / "db")
        assert (again.setting("a"), again.setting("b")) == ("2", None)
        await again.close()

    async def test_a_cancelled_caller_leaves_a_whole_store(self, tmp_path):
        store = await Store.open(tmp_path / "db")
        for number in range(30):
            learning = asyncio.create_task(store.learn("d", "gpu", number))
            await asyncio.sleep(0)
            learning.cancel()
        await store.learn("d", "gpu", 77)
        await store.close()
        again = await Store.open(tmp_path / "db")
        assert again.learned() == {("d", "gpu"): 77}
        await again.close()

    async def test_after_closing_nothing_is_saved(self, tmp_path):
        store = await Store.open(tmp_path / "db")
        await store.close()
        with pytest.raises(NotSavedError):
            await store.put("a", "1")


class TestSchema:
    """Files of older versions are migrated; those of newer ones are left alone."""

    async def test_an_older_file_is_migrated_and_keeps_its_content(self, tmp_path, monkeypatch):
        learned = await filled(tmp_path / "db")
        more = "ALTER TABLE settings ADD COLUMN note TEXT NOT NULL DEFAULT ''"
        monkeypatch.setattr(store_module, "MIGRATIONS", (*store_module.MIGRATIONS, more))
        store = await Store.open(tmp_path / "db")
        assert (store.learned(), store.trouble, store.setting("log_level")) == (learned, None, "debug")
        await store.close()
        assert not list(tmp_path.glob("*corrupt*"))

    async def test_a_newer_file_is_left_alone(self, tmp_path):
        await filled(tmp_path / "db")
        with sqlite3.connect(tmp_path / "db") as file:
            file.execute("PRAGMA user_version = 99")
        file.close()
        before = (tmp_path / "db").read_bytes()
        store = await Store.open(tmp_path / "db")
        assert "newer" in store.trouble
        await store.learn("d", "gpu", 5)
        assert store.learned() == {("d", "gpu"): 5}
        await store.close()
        assert (tmp_path / "db").read_bytes() == before


class TestAnUnusableFile:
    """Where the file can't be used now, it is left alone and the store works from memory."""

    async def test_another_daemon_has_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr(store_module, "BUSY_S", 0.1)
        first = await Store.open(tmp_path / "db")
        second = await Store.open(tmp_path / "db")
        assert "locked" in second.trouble
        await second.learn("d", "gpu", 5)
        assert second.learned() == {("d", "gpu"): 5}
        with pytest.raises(NotSavedError, match="locked"):
            await second.put("a", "1")
        await second.close()
        await first.learn("d", "gpu", 9)
        await first.close()
        assert not list(tmp_path.glob("*corrupt*"))

    async def test_the_folder_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        store = await Store.open(tmp_path / "file" / "db")
        assert store.trouble
        await store.learn("d", "gpu", 5)
        await store.close()


class TestDamage:
    """Fault 22: a torn file is kept aside, and the backup or an empty store takes its place."""

    async def check(self, path, *allowed):
        store = await Store.open(path)
        assert store.trouble is None
        assert store.learned() in allowed
        await store.learn("new", "gpu", 5)
        await store.close()
        again = await Store.open(path)
        assert again.learned() == {**store.learned(), ("new", "gpu"): 5}
        await again.close()

    @pytest.mark.parametrize("garbage", [b"", b"\0" * 9000, b"not a database" * 1000, b"SQLite format 3\0"])
    async def test_a_file_of_garbage_is_replaced_by_the_backup(self, tmp_path, garbage):
        learned = await filled(tmp_path / "db")
        (tmp_path / "db").write_bytes(garbage)
        await self.check(tmp_path / "db", learned)
        assert (tmp_path / "db.corrupt-1").read_bytes() == garbage

    async def test_a_lost_file_is_replaced_by_the_backup(self, tmp_path):
        learned = await filled(tmp_path / "db")
        (tmp_path / "db").unlink()
        await self.check(tmp_path / "db", learned)

    async def test_without_a_good_backup_it_begins_empty_and_keeps_both(self, tmp_path):
        await filled(tmp_path / "db")
        for name in ("db", "db.backup"):
            (tmp_path / name).write_bytes(b"garbage" * 1000)
        (tmp_path / "db.corrupt-1").write_text("an earlier one")
        await self.check(tmp_path / "db", {})
        kept = sorted(file.name for file in tmp_path.glob("*corrupt*"))
        assert kept == ["db.backup.corrupt-1", "db.corrupt-1", "db.corrupt-2"]

    async def test_truncated_anywhere(self, tmp_path):
        learned = await filled(tmp_path / "sound")
        whole = (tmp_path / "sound").read_bytes()
        for number in range(24):
            path = tmp_path / str(number) / "db"
            path.parent.mkdir()
            shutil.copy(tmp_path / "sound.backup", f"{path}.backup")
            path.write_bytes(whole[: len(whole) * number // 24])
            await self.check(path, learned)

    async def test_garbled_anywhere_it_starts_and_tells_nothing_impossible(self, tmp_path):
        learned = await filled(tmp_path / "sound")
        whole = (tmp_path / "sound").read_bytes()
        seed = random.randrange(10**9)
        print("seed", seed)
        dice = random.Random(seed)
        for number in range(60):
            path = tmp_path / str(number) / "db"
            path.parent.mkdir()
            shutil.copy(tmp_path / "sound.backup", f"{path}.backup")
            torn = bytearray(whole)
            start = dice.choice([dice.randrange(100), dice.randrange(len(whole))])
            torn[start : start + 64] = dice.randbytes(64)
            path.write_bytes(torn[: len(whole)])
            store = await Store.open(path)
            assert all(0 <= mib <= 1 << 30 for mib in store.learned().values())
            if list(path.parent.glob("*corrupt*")):
                assert store.learned() == learned
            await store.learn("new", "gpu", 5)
            await store.close()


class TestKilled:
    """Whenever the daemon is killed, what it had saved is there at the next start."""

    def test_while_writing(self, tmp_path):
        out = run(
            """
path = Path(sys.argv[1])
async def writer(pipe):
    store = await Store.open(path)
    n = store.learned().get(("d", "gpu"), 0)
    while True:
        n += 1
        await store.learn("d", "gpu", n)
        await store.put("n", str(n))
        os.write(pipe, b"%d\\n" % n)
async def reader():
    store = await Store.open(path)
    assert store.trouble is None
    await store.close()
    return store.learned().get(("d", "gpu"), 0), int(store.setting("n") or 0)
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
    learned, setting = asyncio.run(reader())
    assert learned >= setting >= (told[-1] if told else 1), (learned, setting, told[-1:])
print(learned, [p.name for p in path.parent.glob("*corrupt*")])
""",
            tmp_path / "db",
        )
        assert out.endswith(" []\n")

    async def test_while_restoring(self, tmp_path):
        learned = await filled(tmp_path / "db")
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
    store = asyncio.run(Store.open(path))
    assert (store.trouble, len(store.learned())) == (None, expected)
    asyncio.run(store.close())
print("done")
""",
            tmp_path / "db",
            len(learned),
        )
        assert out.endswith("done\n")


class TestAFullDisk:
    """Fault 21: what was saved stays, what can't be saved is a warning, and saving goes on when there is room again."""

    async def test_while_running(self, tmp_path):
        learned = await filled(tmp_path / "db")
        run(
            """
async def main():
    store = await Store.open(Path(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    before = store.learned()
    await store.learn("new", "gpu", 5)
    assert store.trouble and store.learned() == {**before, ("new", "gpu"): 5}
    try:
        await store.put("log_level", "error")
    except NotSavedError as error:
        assert store.setting("log_level") == "debug" and error.status == 507
    else:
        raise AssertionError("put() claims to have saved it")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await store.learn("later", "gpu", 6)
    assert store.trouble is None
    os._exit(0)  # not even closed
asyncio.run(main())
""",
            tmp_path / "db",
        )
        store = await Store.open(tmp_path / "db")
        assert (store.learned(), store.setting("log_level")) == ({**learned, ("later", "gpu"): 6}, "debug")
        await store.close()

    async def test_from_the_start(self, tmp_path):
        learned = await filled(tmp_path / "db")
        run(
            """
async def main():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    store = await Store.open(Path(sys.argv[1]))
    await store.learn("new", "gpu", 5)
    assert store.learned()["new", "gpu"] == 5
    await store.close()
asyncio.run(main())
""",
            tmp_path / "db",
        )
        assert not list(tmp_path.glob("*corrupt*"))
        store = await Store.open(tmp_path / "db")
        assert store.learned() == learned
        await store.close()
