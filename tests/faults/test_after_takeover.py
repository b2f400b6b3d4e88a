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
