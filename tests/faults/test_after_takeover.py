"""A daemon that was succeeded keeps nobody from starting anew, however long its own clients stay."""

from __future__ import annotations

import os
import signal

from tests.faults.test_takeover import Upgraded
from tests.support.daemon import Daemon, fake, wait_until


def test_a_successor_that_died_is_replaced_while_the_old_daemon_sees_its_clients_out(tmp_path):
    old = Upgraded(tmp_path, {"models": {"chat": fake()}}).start()
    anew = Daemon(tmp_path, old.config)
    anew.port = old.port
    try:
        with old.client() as client:  # this connection stays open
            client.get("/health").raise_for_status()
            os.kill(old.upgrade(), signal.SIGKILL)
            wait_until(lambda: not old.successors(), what="the successor is dead")
            anew.start()
            assert old.process is not None
            assert old.process.poll() is None
            assert anew.chat("chat").status_code == 200
    finally:
        anew.stop()
        old.end()


class Clumsy(Upgraded):
    program = ("-m", "tests.support.clumsy_daemon")


def test_a_mistake_after_the_last_step_ends_nobody(tmp_path):
    """The successor has everything by then: nothing may be undone."""
    old = Clumsy(tmp_path, {"models": {"chat": fake()}}).start()
    try:
        assert old.chat("chat").status_code == 200
        worker = old.model("chat")["worker"]["pid"]
        assert old.upgrade() in old.successors()
        assert old.chat("chat").status_code == 200
        assert old.model("chat")["worker"]["pid"] == worker
        assert "a mistake after the last step" in old.log_text()
    finally:
        old.end()
