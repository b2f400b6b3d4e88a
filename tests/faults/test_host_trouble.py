"""The machine refuses something: disk, processes, descriptors, a folder. No model is blamed for it, and what is loaded serves on."""

from __future__ import annotations

import contextlib
import resource
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.clients import Call, code
from tests.support.daemon import FAKE_WORKER, Daemon, fake, running, wait_until
from tests.support.small_disk import OnSmallDisk, SmallDisk, small_disk
from tests.support.unprivileged import limit_processes, unprivileged

ONE_STRIKE = {"crash_limit": 1, "backoff_first_s": 0.1, "backoff_max_s": 0.2}
"""A single crash that counts makes a model fail."""


@contextlib.contextmanager
def stopped_after(daemon: Daemon):
    try:
        yield daemon.start()
    finally:
        daemon.stop()
        wait_until(lambda: not daemon.workers(), what="no worker is left")


def through_shell(shell: str = "/bin/sh") -> dict[str, object]:
    """A fake worker that this shell becomes."""
    model = fake()
    return model | {"cmd": [shell, "-c", 'exec "$0" "$@"', *model["cmd"]]}


def crashes(daemon: Daemon, model: str) -> list[str]:
    """What `llmux why` says of its crashes."""
    return [decision["reason"] for decision in daemon.decisions(model) if decision["kind"] == "crash"]


def served_when_over(daemon: Daemon, call: Call, model: str, end_trouble) -> None:
    """The model is refused by the host again and again, which is no crash that counts; then its request is answered."""
    wait_until(lambda: len(crashes(daemon, model)) >= 3, what="it is tried again and again")
    assert {reason.partition(":")[0] for reason in crashes(daemon, model)} == {"host"}
    view = daemon.model(model)
    assert view["state"] in {"backoff", "stopped", "starting"}
    assert call.is_alive(), "its request waits"
    end_trouble()
    assert call.result().status == 200


class TestFolders:
    """A folder of ours that somebody removed is made again; one of the model's counts, but it may come back."""

    @pytest.mark.parametrize("which", ["logs", "."])
    def test_removed(self, tmp_path, which):
        with running(tmp_path, {"models": {"a": fake(), "b": fake()}, "limits": ONE_STRIKE}) as daemon:
            assert daemon.chat("a").status_code == 200
            lock = (daemon.state_dir / "instance.lock").read_text()
            shutil.rmtree(daemon.state_dir / which)
            assert daemon.chat("b").status_code == 200
            assert daemon.chat("a").status_code == 200
            assert daemon.model("a")["generation"] == 1
            logs = daemon.state_dir / "logs"
            assert "listening" in (logs / "b.log").read_text()
            assert logs.stat().st_mode & 0o777 == 0o700
            (daemon.state_dir / "instance.lock").write_text(lock)  # for this test's own eyes

    def test_working_folder(self, tmp_path):
        folder = tmp_path / "share"
        folder.mkdir()
        limits = ONE_STRIKE | {"failed_retry_s": 0.5}
        with running(tmp_path, {"models": {"a": fake(cwd=str(folder))}, "limits": limits}) as daemon:
            folder.rmdir()
            call = Call(daemon, "a").result()
            assert (call.status, code(call.response)) == (503, "model_failed")
            assert str(folder) in call.response.json()["error"]["message"]
            assert daemon.model("a")["crash"]["class"] == "model_unusable"
            folder.mkdir()
            daemon.wait_state("a", "ready")

    def test_program(self, tmp_path):
        """A program that isn't there is never started, and the model comes back when it is."""
        program = tmp_path / "program"
        program.symlink_to(sys.executable)
        model = fake()
        model["cmd"][0] = str(program)
        with running(tmp_path, {"models": {"a": model}, "limits": {"failed_retry_s": 0.2}}) as daemon:
            program.unlink()
            refused = daemon.chat("a")
            assert (refused.status_code, code(refused)) == (503, "model_failed")
            view = daemon.model("a")
            assert (view["crash"]["class"], view["generation"]) == ("model_unusable", 1)
            assert str(program) in refused.json()["error"]["message"]
            program.symlink_to(sys.executable)
            wait_until(lambda: daemon.chat("a").status_code == 200)


class TestDisk:
    @pytest.mark.parametrize("trouble", ["fill_space", "fill_inodes"])
    def test_full(self, tmp_path, trouble, measured):
        """Fault 21: nothing can be written. What is loaded serves on, what isn't is loaded without a log, nothing is lost."""
        models = {name: fake(vram_mib=100) for name in "abc"}
        with small_disk(tmp_path / "disk") as disk:
            with stopped_after(OnSmallDisk(tmp_path, {"models": models, "limits": ONE_STRIKE}, disk)) as daemon:
                for model in ("a", "b"):
                    assert daemon.chat(model).status_code == 200
                state = daemon.state_dir / "state.sqlite3"
                before = state.read_bytes()
                getattr(SmallDisk, trouble)(disk)
                assert daemon.post("/v1/admin/models/b/unload").status_code == 200
                assert [daemon.chat(model).status_code for model in ("a", "b", "c") * 5] == [200] * 15
                assert [daemon.model(model)["generation"] for model in "abc"] == [1, 2, 1]
                assert {line["model"] for line in daemon.events("worker.unlogged")} == {"b", "c"}
                assert crashes(daemon, "b") == crashes(daemon, "c") == []
                disk.free()
                assert state.read_bytes() == before
                assert daemon.post("/v1/admin/models/c/unload").status_code == 200
                assert daemon.chat("c").status_code == 200
                assert "listening" in (daemon.state_dir / "logs" / "c.log").read_text()
            with stopped_after(daemon):
                assert daemon.chat("a").status_code == 200
                assert daemon.events("store.damaged") == []
        measured(served_on_a_full_disk=15)

    def test_no_byte(self, tmp_path):
        """RLIMIT_FSIZE: a worker that can't write its log is served from all the same."""
        with running(tmp_path, {"models": {"a": fake(), "b": fake()}, "limits": ONE_STRIKE}) as daemon:
            assert daemon.chat("a").status_code == 200
            unlimited = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            assert [daemon.chat(model).status_code for model in ("a", "b")] == [200, 200]
            resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, unlimited)
            assert daemon.model("b")["generation"] == 1


class TestRefused:
    """What the kernel refuses now, it may give a moment later: tried again with a pause, never counted."""

    def test_busy_program(self, tmp_path):
        """ETXTBSY: somebody writes the program just now."""
        program = tmp_path / "sh"
        shutil.copy("/bin/sh", program)
        config = {"models": {"a": through_shell(str(program))}, "limits": ONE_STRIKE}
        with running(tmp_path, config) as daemon, contextlib.ExitStack() as stack:
            stack.enter_context(program.open("ab"))
            served_when_over(daemon, Call(daemon, "a"), "a", stack.close)

    def test_no_process(self):
        """EAGAIN: the limit of processes and threads is reached. Probes and what is loaded don't suffer."""
        limits = ONE_STRIKE | {"readiness_interval_s": 0.1, "liveness_interval_s": 0.2}
        config = {"models": {"a": through_shell(), "cold": through_shell()}, "limits": limits}
        with unprivileged(config) as daemon, stopped_after(daemon):
            assert daemon.chat("a").status_code == 200
            limit_processes(daemon, 1)
            call = Call(daemon, "cold")
            wait_until(lambda: len(crashes(daemon, "cold")) >= 10)  # two seconds: ten probes of liveness
            assert daemon.chat("a").status_code == 200
            assert daemon.model("a")["generation"] == 1
            served_when_over(daemon, call, "cold", lambda: limit_processes(daemon, None))
            assert daemon.model("a")["generation"] == 1

    def test_no_descriptor(self, tmp_path):
        """EMFILE: fault 28. A model asked for meanwhile is served once there are descriptors."""
        limits = ONE_STRIKE | {"readiness_interval_s": 0.1, "liveness_interval_s": 0.2}
        with running(tmp_path, {"models": {"a": fake(), "cold": fake()}, "limits": limits}) as daemon:
            assert daemon.chat("a").status_code == 200
            assert daemon.model("a")["generation"] == 1
            with daemon.client() as client, daemon.client() as other:
                for each in (client, other):
                    assert each.get("/health").status_code == 200  # its connection is open from now on
                pid = daemon.process.pid
                _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
                with ThreadPoolExecutor(1) as thread:
                    body = {"model": "cold", "messages": []}
                    asked = thread.submit(lambda: other.post("/v1/chat/completions", json=body).status_code)
                    try:
                        # A probe each 0.1 s, and patient ones between them.
                        wait_until(
                            lambda: daemon.log_text().count('"worker.unseen"') >= 40, what="probes that saw nothing"
                        )
                        assert client.get("/v1/admin/models/a").json()["generation"] == 1
                        assert not asked.done()
                    finally:
                        resource.prlimit(pid, resource.RLIMIT_NOFILE, (1024, hard))
                    assert asked.result() == 200
            assert {reason.partition(":")[0] for reason in crashes(daemon, "cold")} <= {"host"}
            assert daemon.model("a")["generation"] == 1


class TestFailed:
    def test_tried_again(self, tmp_path, measured):
        """Fault 9: five starts, then the cause to everybody at once; tried again after the pause, and there again by itself."""
        flag = tmp_path / "mended"
        script = tmp_path / "start.sh"
        script.write_text(f'[ -e {flag} ] || exit 3; exec "$(command -v python3)" -I -S {FAKE_WORKER} --port "$1"\n')
        model = {"runtime": "command", "cmd": ["/bin/sh", str(script), "${port}"], "vram_mib": 100}
        limits = {"backoff_first_s": 0.05, "backoff_max_s": 0.05, "failed_retry_s": 3.0}
        with running(tmp_path, {"models": {"a": model}, "limits": limits}) as daemon:
            assert daemon.chat("a").status_code == 503
            view = daemon.wait_state("a", "failed")
            assert 0.0 <= view["retry_s"] <= 3.0
            assert "next try in 3 s" in view["reason"]
            call = Call(daemon, "a").result()
            assert "tried again in" in call.response.json()["error"]["message"]
            assert 1 <= int(call.response.headers["retry-after"]) <= 3
            wait_until(lambda: daemon.model("a")["generation"] == 6)
            daemon.wait_state("a", "failed")
            kinds = [decision["kind"] for decision in daemon.decisions("a")]
            assert kinds.count("retry") == 1, "one start each pause"
            assert kinds.count("failed") == 2
            flag.touch()
            daemon.wait_state("a", "ready")
            assert daemon.model("a")["retry_s"] is None
            measured(refused_in_s=call.elapsed_s)
