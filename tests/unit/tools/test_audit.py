"""What `make audit` tells of a database's answers, and of a database that doesn't answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tools import audit, locks

VULNERABLE = {"id": "PYSEC-1", "aliases": ["CVE-1"], "published": "2026-01-01T00:00:00Z", "summary": "Bad."}


class Database(ThreadingHTTPServer):
    """Answers as OSV does, knows of one package, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked: list[str] = []
        self.status = 200
        self.url = f"http://127.0.0.1:{self.server_port}/v1/query"


class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, version = query["package"]["name"], query["version"]
        self.server.asked.append(f"{name}=={version}")
        fixed = {"ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.0"}]}]}
        affected = [{"package": {"name": name, "ecosystem": "PyPI"}, "versions": ["1.0"], **fixed}]
        found = {"vulns": [VULNERABLE | {"affected": affected}]} if (name, version) == ("bad", "1.0") else {}
        body = json.dumps(found).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.fixture
def database() -> Iterator[Database]:
    with Database() as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class TestAudit:
    """Its exit code is 0 only for a database that was asked of everything, and knew of nothing."""

    def test_nothing_known(self, database, capsys):
        assert audit.audit({"good==1.0", "good==2.0"}, ["--osv-url", database.url]) == 0
        assert sorted(database.asked) == ["good==1.0", "good==2.0"]
        assert capsys.readouterr().out == "audited 2 packages, known vulnerabilities: 0\n"

    def test_a_finding(self, database, capsys):
        assert audit.audit({"bad==1.0", "bad==2.0", "good==1.0"}, ["--osv-url", database.url]) == audit.FOUND
        told = capsys.readouterr().out
        assert "bad==1.0 (no lock): PYSEC-1 CVE-1, fixed in 2.0\n" in told
        assert "bad==2.0" not in told
        assert "audited 3 packages, known vulnerabilities: 1" in told

    def test_a_finding_that_does_not_concern_us(self, database):
        assert audit.audit({"bad==1.0"}, ["--osv-url", database.url, "--ignore-vuln", "PYSEC-1"]) == 0

    def test_a_database_that_fails(self, database, capsys):
        database.status = 500
        assert audit.audit({"good==1.0"}, ["--osv-url", database.url]) == audit.NOT_AUDITED
        assert capsys.readouterr().out.startswith("audited nothing: the database could not be asked: ")

    def test_no_database(self, database, capsys):
        with Database() as gone:
            pass
        assert audit.audit({"good==1.0"}, ["--osv-url", gone.url]) == audit.NOT_AUDITED
        assert capsys.readouterr().out.startswith("audited nothing: the database could not be asked: ")

    def test_a_database_that_goes_away_is_no_success(self, database, capsys, monkeypatch):
        ask = audit._audit_batch

        def once(batch, words):
            found = ask(batch, words)
            database.status = 500
            return found

        monkeypatch.setattr(audit, "_audit_batch", once)
        assert audit.audit({"good==1.0", "good==2.0"}, ["--osv-url", database.url]) == audit.NOT_AUDITED
        assert capsys.readouterr().out.startswith("audited 1 of 2 packages: ")


class TestWhatIsAsked:
    """Everything that any lock pins, once."""

    def test_batches_hold_a_package_once(self):
        found = audit.batches(locks.all_pins())
        assert {pin for batch in found for pin in batch} == locks.all_pins()
        for batch in found:
            assert len({pin.partition("==")[0] for pin in batch}) == len(batch)

    def test_every_lock_is_there(self):
        found = {path for paths in locks.environments().values() for path in paths}
        assert found == {*locks.ROOT.glob("*.lock"), *locks.ROOT.glob("runtimes/**/*.lock")}

    def test_holders(self):
        pin = next(pin for pin in locks.all_pins() if pin.startswith("pykakasi=="))
        assert audit.holders(pin) == "chatterbox"
