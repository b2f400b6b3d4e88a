from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from supervisor.core.types import DeviceId, Generation, ModelId
from supervisor.host.memory import host_memory
from supervisor.host.memory.host_memory import DEVICE, HostMemory, MemoryGroup, limited_groups
from supervisor.host.memory.memory import MIB, HolderPids
from supervisor.host.process.procfs import ProcessTable, bytes_read, resident, resident_quickly

A, B = (ModelId("a"), Generation(1)), (ModelId("b"), Generation(1))
TAKE = "import sys; taken = bytearray(b'1') * ({} << 20); print('taken', flush=True); sys.stdin.read()"
MAP = """
import mmap, sys
with open({!r}, 'rb') as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
sum(mapped[i] for i in range(0, len(mapped), 4096))
print('mapped', flush=True)
sys.stdin.read()
"""

GROW = """
import mmap, sys
def stop():
    print(flush=True)
    sys.stdin.readline()
stop()
with mmap.mmap(-1, 64 << 20) as taken:  # shared anonymous memory: both figures see it
    taken.write(b'1' * len(taken))
    stop()
stop()
"""


def on_host(*roots):
    return HolderPids((DEVICE,), roots, loading=False)


def meminfo(tmp_path, total_mib, available_mib):
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal: {total_mib * 1024} kB\nMemFree: 1 kB\nMemAvailable: {available_mib * 1024} kB\n")
    return path


class TestBudget:
    """The budget that models share: a part of the machine's or the control group's memory."""

    def test_default_is_four_fifths(self, tmp_path):
        host = HostMemory(meminfo=meminfo(tmp_path, 10000, 9000), groups=())
        (info,) = host.devices()
        assert (info.id, info.kind.name, info.total_mib, info.margin_mib) == ("host", "host", 8000, 512)
        assert info.spec.returns_at_exit
        assert info.key == "host"

    def test_a_configured_budget_is_cut_to_what_there_is(self, tmp_path):
        totals = [
            HostMemory(budget_mib=budget, margin_mib=0, meminfo=meminfo(tmp_path, 10000, 9000), groups=()).devices()[0]
            for budget in (3000, 99999)
        ]
        assert [(info.total_mib, info.margin_mib) for info in totals] == [(3000, 0), (10000, 0)]

    def test_a_budget_that_is_there_has_no_hidden_margin(self, tmp_path):
        found = [
            HostMemory(budget_mib=budget, meminfo=meminfo(tmp_path, 10000, 9000), groups=())
            .devices()[0]
            .spec.usable_mib
            for budget in (3000, 99999)
        ]
        assert found == [3000, 10000 - 512]

    def test_a_control_group_limits_it(self, tmp_path):
        (tmp_path / "memory.max").write_text(f"{4000 * MIB}\n")
        (tmp_path / "memory.current").write_text(f"{3500 * MIB}\n")
        (tmp_path / "memory.stat").write_text(f"anon 7\nactive_file {100 * MIB}\ninactive_file {200 * MIB}\n")
        host = HostMemory(meminfo=meminfo(tmp_path, 10000, 9000), groups=(MemoryGroup(tmp_path, 2),))
        assert host.devices()[0].total_mib == 3200
        (sample,) = host.read({}).devices
        assert (sample.free_mib, sample.outside_mib) == (800, 2400)

    def test_free_is_the_smaller_of_available_and_budget(self, tmp_path):
        path = meminfo(tmp_path, 10000, 9000)
        host = HostMemory(meminfo=path, groups=())
        assert host.read({}).devices[0].free_mib == 8000
        meminfo(tmp_path, 10000, 5000)
        (sample,) = host.read({}).devices
        assert (sample.free_mib, sample.outside_mib) == (5000, 3000)

    def test_an_unreadable_meminfo_is_an_error_of_the_system(self, tmp_path):
        path = meminfo(tmp_path, 10000, 9000)
        host = HostMemory(meminfo=path, groups=())
        path.write_text("MemTotal: 10 kB\n")
        with pytest.raises(OSError, match="MemAvailable"):
            host.read({})


class TestUse:
    """A worker's use is the physical memory of its tree, measured on real processes."""

    def test_a_worker_is_its_whole_tree(self, spawn):

        parent = spawn(
            f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-I', '-S', '-c', {TAKE.format(40)!r}],"
            "stdout=subprocess.PIPE)\nchild.stdout.readline()\n" + TAKE.format(30)
        )
        assert parent.stdout.readline() == b"taken\n"
        (worker,) = HostMemory().read({A: on_host(parent.pid)}).workers
        assert 70 <= worker.used_mib <= 110

    def test_budget_is_use_and_free_and_outside(self, spawn):
        process = spawn(TAKE.format(50))
        process.stdout.readline()
        host = HostMemory(budget_mib=1000)
        reading = host.read({A: on_host(process.pid)})
        (sample,) = reading.devices
        (worker,) = reading.workers
        use = 1000 - sample.free_mib - sample.outside_mib
        assert 50 <= use <= worker.used_mib <= use + 20  # the interpreter's pages, which it shares with this one

    def test_its_memory_is_back_when_it_has_ended(self, spawn):
        process = spawn(TAKE.format(200))
        process.stdout.readline()
        host = HostMemory(budget_mib=1000)
        holders = {A: on_host(process.pid)}
        assert host.read(holders).devices[0].free_mib <= 800
        process.kill()
        process.wait()
        reading = host.read(holders)
        assert reading.devices[0].free_mib == 1000
        assert reading.workers[0].used_mib == 0

    def test_mapped_model_pages_count_once_and_do_not_count_as_available(self, spawn, tmp_path):
        model = tmp_path / "model.gguf"
        model.write_bytes(os.urandom(60 * MIB))
        first, second = spawn(MAP.format(str(model))), spawn(MAP.format(str(model)))
        assert first.stdout.readline() == second.stdout.readline() == b"mapped\n"
        kernel = meminfo(tmp_path, 10000, 500)  # says that 500 MiB, our mapped pages among them, could be had
        host = HostMemory(budget_mib=9000, meminfo=kernel, groups=())
        (sample,) = host.read({A: on_host(first.pid), B: on_host(second.pid)}).devices
        assert 60 <= 9000 - sample.free_mib - sample.outside_mib <= 100
        assert 400 <= sample.free_mib <= 440

    def test_a_worker_takes_what_it_would_take_alone(self, spawn, tmp_path):
        """PSS would be half of the shared pages: as a learned footprint too little for a worker that runs alone."""
        model = tmp_path / "model.gguf"
        model.write_bytes(os.urandom(60 * MIB))
        host = HostMemory()

        def taken(*processes) -> list[int]:
            holders = {(ModelId(str(process.pid)), Generation(1)): on_host(process.pid) for process in processes}
            return [worker.used_mib for worker in host.read(holders).workers]

        first = spawn(MAP.format(str(model)))
        assert first.stdout.readline() == b"mapped\n"
        (alone,) = taken(first)
        second = spawn(MAP.format(str(model)))
        assert second.stdout.readline() == b"mapped\n"
        assert alone >= 60
        assert taken(first, second) == pytest.approx([alone, alone], abs=2)

    def test_pages_that_a_worker_shares_with_itself_count_once(self, spawn):
        process = spawn(
            "import os, sys\ntaken = bytearray(b'1') * (60 << 20)\nif os.fork() == 0:\n    sys.stdin.read()\n"
            "print('taken', flush=True)\nsys.stdin.read()"
        )
        assert process.stdout.readline() == b"taken\n"
        (worker,) = HostMemory().read({A: on_host(process.pid)}).workers
        assert 60 <= worker.used_mib <= 95

    def test_strangers_and_holders_of_other_devices_are_not_measured(self):
        elsewhere = HolderPids((DeviceId("gpu0"),), (os.getpid(),), loading=False)
        reading = HostMemory().read({A: elsewhere, B: on_host()})
        assert [(worker.model, worker.used_mib) for worker in reading.workers] == [("b", 0)]

    def test_a_process_whose_first_thread_has_ended_still_holds_its_memory(self, spawn):
        process = spawn(
            "import sys, threading, ctypes\n"
            "taken = bytearray(b'1') * (50 << 20)\n"
            "threading.Thread(target=sys.stdin.read).start()\n"
            "print('taken', flush=True)\n"
            "ctypes.CDLL(None).syscall(60, 0)\n"  # exit() of this thread only
        )
        process.stdout.readline()
        deadline = time.monotonic() + 20
        while "State:\tZ" not in Path(f"/proc/{process.pid}/status").read_text():
            assert time.monotonic() < deadline
        assert HostMemory().read({A: on_host(process.pid)}).workers[0].used_mib >= 50

    def test_a_process_that_hides_its_maps_is_measured_by_its_rss(self, spawn):
        process = spawn("import ctypes\nctypes.CDLL(None).prctl(4, 0)\n" + TAKE.format(50))
        process.stdout.readline()
        found = resident(process.pid)
        assert 50 * MIB <= found.total_bytes <= 90 * MIB
        assert 0 < found.file_bytes < found.total_bytes


class TestCost:
    """A large process isn't measured in full every time; its growth since then still counts."""

    def test_between_full_looks_the_growth_of_rss_is_added(self, monkeypatch, spawn):
        monkeypatch.setattr(host_memory, "MEASURING_SHARE", 1e-9)  # one full look, then never again
        host = HostMemory()
        process = spawn(GROW)
        holders = {A: on_host(process.pid)}

        def used() -> int:
            """Measure at the next stop of the process, then let it go on."""
            process.stdout.readline()
            found = host.read(holders).workers[0].used_mib
            process.stdin.write(b"\n")
            process.stdin.flush()
            return found

        before, after, again = used(), used(), used()
        assert 60 <= after - before <= 140
        assert again < after - 30

    def test_full_looks_cost_a_bounded_share_of_a_core(self, monkeypatch):
        looks = []

        def slow(pid):
            looks.append(pid)
            return resident(pid)

        clock = [0.0]
        costs = iter(range(1000))
        monkeypatch.setattr(host_memory, "resident", slow)
        monkeypatch.setattr(host_memory.time, "perf_counter", lambda: next(costs))  # each look takes a second
        host = HostMemory(clock=lambda: clock[0])
        for _ in range(100):
            host.read({A: on_host(os.getpid())})
            clock[0] += 1
        assert looks.count(os.getpid()) == 5  # other tests' processes may be below us as well


class TestProcesses:
    def test_a_tree_is_its_root_and_everything_below(self):
        table = ProcessTable({1: 0, 10: 1, 11: 10, 12: 11, 20: 1})
        assert table.tree([10]) == {10, 11, 12}
        assert table.tree([11, 20, 99]) == {11, 12, 20}

    def test_the_scan_knows_us(self):
        assert ProcessTable.scan().parents[os.getpid()] == os.getppid()

    def test_nothing_is_known_of_a_process_that_is_gone(self):
        assert resident(99_999_999).total_bytes == resident_quickly(99_999_999).total_bytes == 0
        assert bytes_read(99_999_999) == (0, 0)

    def test_bytes_read_grow(self, tmp_path):
        (tmp_path / "file").write_bytes(b"1" * 100_000)
        before = sum(bytes_read(os.getpid()))
        (tmp_path / "file").read_bytes()
        assert sum(bytes_read(os.getpid())) >= before + 100_000


class TestControlGroups:
    """Limits come from the group we are in and from all above it."""

    def tree(self, tmp_path, cgroup, mountinfo):
        (tmp_path / "cgroup").write_text(cgroup)
        (tmp_path / "mountinfo").write_text(mountinfo.format(tmp_path))
        return tmp_path

    def test_version_2_with_a_limited_ancestor(self, tmp_path):
        proc = self.tree(tmp_path, "0::/user/app\n", "30 20 0:1 / {}/cg rw - cgroup2 cgroup2 rw\n")
        (tmp_path / "cg/user/app").mkdir(parents=True)
        (tmp_path / "cg/user/memory.max").write_text("1048576\n")
        (tmp_path / "cg/user/app/memory.max").write_text("max\n")
        (group,) = limited_groups(proc)
        assert (group.folder, group.version, group.limit()) == (tmp_path / "cg/user", 2, 1048576)

    def test_version_1_in_a_container_that_sees_only_its_part(self, tmp_path):
        mount = "30 20 0:1 /docker/abc {}/cg rw shared:1 - cgroup cgroup rw,memory\n"
        proc = self.tree(tmp_path, "5:cpu:/docker/abc\n4:memory:/docker/abc\n", mount)
        (tmp_path / "cg").mkdir()
        (tmp_path / "cg/memory.limit_in_bytes").write_text("2097152")
        (tmp_path / "cg/memory.usage_in_bytes").write_text("1048576")
        (tmp_path / "cg/memory.stat").write_text("active_file 1\ntotal_active_file 4096\ntotal_inactive_file 4096\n")
        (group,) = limited_groups(proc)
        assert (group.limit(), group.available()) == (2097152, 1048576 + 8192)

    def test_no_limit_is_no_group(self, tmp_path):
        proc = self.tree(tmp_path, "4:memory:/\n", "30 20 0:1 / {}/cg rw - cgroup cgroup rw,memory\n")
        (tmp_path / "cg").mkdir()
        (tmp_path / "cg/memory.limit_in_bytes").write_text("9223372036854771712")
        assert limited_groups(proc) == ()

    def test_a_path_outside_the_mount_is_the_mount(self, tmp_path):
        proc = self.tree(tmp_path, "0::/../elsewhere\n", "30 20 0:1 /box {}/cg rw - cgroup2 cgroup2 rw\n")
        (tmp_path / "cg").mkdir()
        (tmp_path / "cg/memory.max").write_text("4096")
        assert [group.limit() for group in limited_groups(proc)] == [4096]

    def test_this_machine_can_be_read(self):
        assert all(group.limit() for group in limited_groups())
