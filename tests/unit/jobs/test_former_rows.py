"""Rows of the version before jobs were one collection are read once, and converted.

`tests/golden/state/schema_3.sql` is what such a daemon left that was killed while everything was under way.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from pathlib import Path
from typing import Any, Final

from structlog.testing import capture_logs

from supervisor.host.store.store import Footprints, Store
from supervisor.jobs.job import Batch, Inference, Line, Load, Response
from supervisor.jobs.jobs import Jobs

FORMER: Final = Path(__file__).parents[2] / "golden" / "state" / "schema_3.sql"
STATES: Final = {
    "waiting": "queued",
    "loading": "running",
    "ready": "completed",
    "validating": "queued",
    "in_progress": "running",
    "finalizing": "running",
    "cancelling": "running",
}


def former(folder: Path, more: dict[tuple[str, str], str] | None = None) -> dict[tuple[str, str], str]:
    """A file of such a daemon, with further rows; all its rows."""
    with contextlib.closing(sqlite3.connect(folder / "state.sqlite3")) as file, file:
        file.executescript(FORMER.read_text())
        file.executemany(
            "INSERT INTO entries VALUES (?, ?, ?)", [(*entry, text) for entry, text in (more or {}).items()]
        )
        rows = file.execute("SELECT collection, key, value FROM entries").fetchall()
    return {(collection, key): text for collection, key, text in rows}


def converted(rows: dict[tuple[str, str], str]) -> dict[str, dict[str, Any]]:
    """What the jobs are to be, by id."""
    found = {}
    for (collection, key), text in rows.items():
        row = json.loads(text)
        if collection == "jobs":
            line = row.pop("line", None)
            kind = "line" if line else "response" if row["response"] else "inference"
            found[key] = {**row, **(line or {}), "kind": kind}
        elif collection == "batches":
            found[key] = {**row, "kind": "batch", "state": STATES.get(row["state"], row["state"])}
        elif collection == "loads":
            error = {"message": row["reason"], "code": "load_failed"} if row["state"] == "failed" else None
            new = {"kind": "load", "id": f"load-{key}", "created_at": row.pop("asked_at"), "error": error}
            model = re.sub("#[1-9][0-9]*$", "", row["worker"])
            found[f"load-{key}"] = {**row, **new, "model": model, "state": STATES.get(row["state"], row["state"])}
    return found


async def jobs_in(folder: Path) -> tuple[Jobs, dict[str, Any], list[str]]:
    """All jobs, their rows, and the names of those that can't be read."""
    state = await Store.open(folder / "state.sqlite3")
    assert state.trouble is None
    jobs = Jobs()
    with capture_logs() as told:
        jobs.open(state)
    await state.close()
    assert not [*folder.glob("*.broken-*")]
    return jobs, state.items("jobs"), [line["job"] for line in told]


class TestReal:
    """What a daemon wrote."""

    async def test_each_is_what_it_was(self, tmp_path):
        expected = converted(former(tmp_path))
        for _ in range(2):  # converted, and read again
            jobs, rows, unread = await jobs_in(tmp_path)
            assert (rows, unread) == (expected, [])
            found = {kind: len(jobs.of(kind)) for kind in (Inference, Response, Line, Batch, Load)}
            assert found == {Inference: 14, Response: 1, Line: 5, Batch: 5, Load: 9}
        (line,) = [line for line in jobs.of(Line) if line.number == 6]
        assert (line.batch, line.custom_id, line.model) == ("batch_65e4c7060f9234323d268dbc", "line 5", "slow")
        (response,) = jobs.of(Response)
        assert response.response == "resp_8119dd68d0c0d0724af90fc83b63ca20"
        states = {load.id: (load.state, load.worker, load.model) for load in jobs.of(Load)}
        assert states["load-1"] == ("failed", "crash", "crash")
        assert states["load-3"] == ("completed", "two#2", "two")
        assert states["load-9"] == ("queued", "big", "big")
        assert [batch.state for batch in jobs.of(Batch)] == ["completed", "failed", "cancelled", "running", "running"]
        assert jobs.of(Batch)[0].metadata == {"for": 'the "tests" \U0001f600'}
        assert jobs.of(Batch)[1].problems[0].code == "duplicate_custom_id"

    async def test_all_else_is_untouched(self, tmp_path):
        rows = former(tmp_path)
        state = await Store.open(tmp_path / "state.sqlite3")
        others = {collection for collection, _ in rows} - {"jobs", "batches", "loads"}
        assert len(others) > 3
        for collection in others:
            expected = {key: json.loads(text) for (name, key), text in rows.items() if name == collection}
            assert state.items(collection) == expected
        views = await state.run(lambda file: file.execute("SELECT number FROM requests").fetchall())
        await state.close()
        assert views == [(1,), (2,)]
        assert (state.items("batches"), state.items("loads")) == ({}, {})


class TestOther:
    """What is rare."""

    async def test_states_and_names(self, tmp_path):
        rows = former(tmp_path)
        batch = json.loads(next(text for (name, _), text in rows.items() if name == "batches"))
        line = json.loads(next(text for (name, _), text in rows.items() if name == "jobs" and '"custom_id"' in text))
        load = json.loads(rows["loads", "1"])
        (tmp_path / "state.sqlite3").unlink()
        more: dict[tuple[str, str], Any] = {}
        for state in ("validating", "finalizing", "cancelling", "expired"):
            more["batches", f"batch_{state}"] = {**batch, "id": f"batch_{state}", "state": state, "cancelling_at": 1.5}
        for number, name in enumerate(("a#b", "a#0", "a##2", "a#1#02", "a#1#30", "7", "#", "ü#12", "a/b#1x"), 20):
            more["loads", str(number)] = {**load, "id": str(number), "worker": name, "state": "interrupted"}
        for number, custom_id in enumerate(("ä\n", "\0after", "\U0001f600", '"\\', "\x7f", "null")):
            of_line = {**line["line"], "custom_id": custom_id}
            more["jobs", f"job_{number}"] = {**line, "id": f"job_{number}", "line": of_line}
        expected = converted(former(tmp_path, {entry: json.dumps(row) for entry, row in more.items()}))
        _, found, unread = await jobs_in(tmp_path)
        assert (found, unread) == (expected, [])

    async def test_what_can_not_be_read(self, tmp_path):
        """It stays, is told, and doesn't make the file count as damaged."""
        deep = '{"line": ' + '{"a": ' * 900 + "1" + "}" * 901
        values = ['"x"', "5", "null", "[]", "{}", '{"line": 5}', '{"line": {"batch": null}}', deep, '{"a": NaN}', "NaN"]
        values += ['{"state": {"a": 1}, "worker": [1], "asked_at": {}}', '{"worker": "\\ud800"}', '{"a": 1, "a": 2}']
        more = {
            (collection, f"{number}"): text
            for collection in ("jobs", "batches", "loads")
            for number, text in enumerate(values, 50)
        }
        more["batches", "batch_taken"] = more["jobs", "batch_taken"] = "{}"
        expected = converted({**former(tmp_path)})
        (tmp_path / "state.sqlite3").unlink()
        former(tmp_path, more)
        jobs, rows, unread = await jobs_in(tmp_path)
        assert {name: row for name, row in rows.items() if name not in unread} == expected
        assert {job.id for kind in (Inference, Batch, Load) for job in jobs.of(kind)} == {*expected}
        assert {*unread} == {*(key for _, key in more)} | {f"load-{key}" for name, key in more if name == "loads"}

    async def test_text_that_is_no_json_is_damage_as_ever(self, tmp_path):
        former(tmp_path, {("jobs", "job_1"): "{", ("loads", "50"): ""})
        state = await Store.open(tmp_path / "state.sqlite3")
        await state.close()
        assert (state.trouble, state.items("jobs")) == (None, {})
        assert [*tmp_path.glob("*.broken-*")]

    async def test_footprints(self, tmp_path):
        path = tmp_path / "llmux.sqlite3"
        with contextlib.closing(sqlite3.connect(path)) as file, file:
            file.executescript(FORMER.read_text())
            file.execute("DELETE FROM entries")
            file.execute("INSERT INTO entries VALUES ('host', 'm', '100'), ('load_ms', 'm', '1500')")
        cache = await Footprints.open(path)
        assert (cache.learned(), cache.load_times()) == ({("m", "host"): 100}, {"m": 1.5})
        await cache.close()
