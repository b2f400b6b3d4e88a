"""llama.cpp's builds for GPUs: fetched from a stand-in of its releases, checked, unpacked, tried, and used."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from runtimes.installed import program
from runtimes.llama_server.adapter import LlamaServerAdapter
from runtimes.registry import REGISTRY
from supervisor.cli.bench import gpu_report
from supervisor.cli.environments import environments, packages
from supervisor.cli.environments.packages import Wanted
from supervisor.cli.models import model_entries
from supervisor.core.events import DeviceSample
from supervisor.errors import InvalidRequestError
from supervisor.host.environments import venvs
from supervisor.host.environments.archives import ReleaseError
from supervisor.host.environments.archives.elf import needs
from supervisor.host.environments.archives.unpack import unpack
from supervisor.host.environments.installer import InstallError
from tests.support import build_llama_server, fake_nvml, fake_releases, tiny
from tests.support.clients import Gpu
from tests.support.daemon import running
from tests.support.fake_releases import Releases

PINNED, OTHER = "b11146", "b11400"
NAME = "llama_server"
WORLD = f"gpu builds {os.getpid()}"  # of this file's programs, whose script says so

pytestmark = pytest.mark.binary


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> dict[str, Path]:
    """By what they are. CUDA's libraries, half a gigabyte, are left out: no build here needs them."""
    folder = tmp_path_factory.mktemp("archives")
    (folder / "idle").mkdir()
    return {
        "pinned": fake_releases.archive(folder, PINNED, "vulkan", world=WORLD),
        "other": fake_releases.archive(folder, OTHER, "vulkan", world=WORLD),
        "idle": fake_releases.archive(folder / "idle", PINNED, "vulkan", vram_mib=0, world=WORLD),
    }


@dataclass
class Machine:
    """One with a scripted NVIDIA card for which only Vulkan's build suits."""

    folder: Path
    releases: Releases
    card: Gpu
    said: list[str]

    @property
    def runtimes(self) -> Path:
        return self.folder / "runtimes"

    def install(self, **wanted: object) -> str:
        """What was said."""
        self.said.clear()
        environments.install(NAME, self.runtimes, self.said.append, wanted=Wanted(**wanted))
        return "\n".join(self.said)

    def used(self) -> tuple[str | None, str | None]:
        found = program((self.runtimes / NAME).resolve())
        assert found is not None
        return found.build, found.kind


@pytest.fixture
def machine(tmp_path, archives, monkeypatch) -> Iterator[Machine]:
    card = Gpu(tmp_path)
    cards = [{"total_mib": 16384, "name": "NVIDIA Fake 16 GiB"}]
    fake_nvml.write_script(card.script, cuda=[12, 4], driver="550.1", gpus=cards, world=WORLD)
    for name, value in card.env.items():
        monkeypatch.setenv(name, value)
    icd = tmp_path / "fake_icd.json"
    icd.write_text("{}")
    monkeypatch.setenv("VK_DRIVER_FILES", str(icd))
    monkeypatch.setattr("supervisor.host.memory.machine.look.__defaults__", (None, lambda _library: True))
    with fake_releases.serving() as releases:
        monkeypatch.setenv("LLMUX_LLAMA_CPP_RELEASES", releases.url)
        releases.add(PINNED, archives["pinned"])
        releases.add(OTHER, archives["other"])
        pins = releases.pins(tmp_path / "pins.json", PINNED)
        known = LlamaServerAdapter.archives
        assert known is not None
        monkeypatch.setattr(LlamaServerAdapter, "archives", replace(known, pins=pins))
        assert REGISTRY.get(NAME).archives.pins == pins
        yield Machine(tmp_path, releases, card, [])


class TestInstall:
    """`llmux runtimes install llama_server` takes the build that computes on the GPU."""

    def test_a_model_then_runs_on_the_gpu(self, machine):
        said = machine.install()
        assert "Vulkan computes on it, at about half of CUDA's speed" in said
        assert "A driver for CUDA 12.8 or newer would give cuda-12.8" in said
        assert "Vulkan0 gave the processor's answer" in said
        assert machine.used() == (PINNED, "vulkan")
        model = {"path": str(tiny.model(name="tiny-chat")), "threads": 1}
        config = {"devices": "auto", "models": {"chat": model}, "server": {"runtimes_dir": str(machine.runtimes)}}
        env = machine.card.env | {"PATH": os.environ["PATH"]}
        with running(machine.folder, config, env=env) as daemon:
            assert daemon.chat("chat").json()["choices"][0]["message"]["content"] == "Hello from a tiny model"
            told = daemon.model("chat")
            assert (told["device"], told["warnings"]) == ("gpu0", [])
            words = Path(f"/proc/{told['worker']['pid']}/cmdline").read_bytes().split(b"\0")
            assert words[words.index(b"--device") + 1] == b"none", "the script in front has taken its GPU's name"

    def test_a_model_that_is_newer_names_the_build_and_the_command(self, machine, tmp_path):
        machine.install()
        model = tmp_path / "newer.gguf"
        content = tiny.model(name="tiny-chat").read_bytes()
        assert content.count(b"general.architecture") == 1
        at = content.index(b"general.architecture") + len(b"general.architecture") + 4 + 8  # its type, its length
        model.write_bytes(content[:at] + b"q" + content[at + 1 :])
        config = {"models": {"newer": {"path": str(model), "vram_mib": 100}}, "devices": "auto"}
        config["server"] = {"runtimes_dir": str(machine.runtimes)}
        with running(machine.folder, config, env=machine.card.env | {"PATH": os.environ["PATH"]}) as daemon:
            told = daemon.chat("newer").json()["error"]["message"]
        assert f"build {PINNED} of llama.cpp doesn't know this model: llmux runtimes update llama_server" in told

    def test_again_does_nothing(self, machine):
        machine.install()
        machine.releases.asked.clear()
        assert "already installed" in machine.install()
        assert not machine.releases.asked
        assert not list((machine.runtimes / ".downloads").iterdir())

    def test_one_that_computes_elsewhere_is_not_taken(self, machine, archives):
        machine.releases.add(PINNED, archives["idle"])
        machine.releases.pins(machine.folder / "pins.json", PINNED)
        said = machine.install()
        assert "it took none of the GPU's memory, so it computed on the processor" in said
        assert "no build computes on the GPU" in said
        assert machine.used() == (None, None)

    def test_a_full_gpu_is_no_bad_build(self, machine):
        environments.install(NAME, machine.runtimes, machine.said.append, plain=True)
        cards = [{"total_mib": 16384, "name": "NVIDIA Fake 16 GiB", "processes": [{"pid": 1, "mib": 16000}]}]
        fake_nvml.write_script(machine.card.script, cuda=[12, 4], driver="550.1", gpus=cards, world=WORLD)
        with pytest.raises(
            InstallError, match=r"Fake 16 GiB \(gpu0\) has only 384 MiB free, .* end what holds its memory"
        ):
            machine.install()
        assert machine.used() == (None, None)

    def test_one_that_cant_be_read_is_not_called_full(self, machine, monkeypatch):
        async def unreadable(_, device):
            return DeviceSample(device.id, 0, stale=True)

        monkeypatch.setattr("supervisor.cli.environments.proof._sample_device", unreadable)
        assert "its memory can't be read now" in machine.install()
        assert machine.used() == (None, None)

    def test_the_demos_is_plain_and_gives_way(self, machine):
        environments.install(NAME, machine.runtimes, machine.said.append, plain=True)
        assert (machine.used(), machine.releases.asked) == ((None, None), [])
        machine.install()
        assert machine.used() == (PINNED, "vulkan")

    def test_the_processor_that_was_asked_for_stays(self, machine):
        environments.install(NAME, machine.runtimes, machine.said.append, device="cpu")
        machine.install()
        assert machine.used() == (None, None)

    def test_adding_a_file_looks_for_it(self, machine, tmp_path, monkeypatch):
        environments.install(NAME, machine.runtimes, machine.said.append, plain=True)
        monkeypatch.setenv("LLMUX_SERVER__RUNTIMES_DIR", str(machine.runtimes))
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        said: list[str] = []
        model_entries.add_files(
            model_entries.target(tmp_path / "llmux.yaml"), tiny.model(name="tiny-chat"), "chat", said.append
        )
        assert "llama_server is installed for the processor alone; looking for a build for the GPU:" in said
        assert machine.used() == (PINNED, "vulkan"), said
        assert not any("computes on the processor" in line for line in said), said

    def test_a_machine_without_a_gpu_asks_nobody(self, machine, monkeypatch):
        monkeypatch.delenv("LLMUX_FAKE_NVML")
        machine.install()
        assert machine.used() == (None, None)
        assert not machine.releases.asked


class TestReport:
    """`llmux bench --gpu-report`: a block that anybody may see."""

    @pytest.fixture(autouse=True)
    def folder(self, machine, monkeypatch):
        monkeypatch.setenv("LLMUX_SERVER__RUNTIMES_DIR", str(machine.runtimes))
        monkeypatch.setenv("HOME", str(machine.folder))

    def test_it_computes(self, machine):
        machine.install()
        told = gpu_report.report(machine.said.append)
        (row,) = told.as_json()["gpus"]
        assert (row["GPU"], row["Driver"]) == ("NVIDIA Fake 16 GiB", "550.1, CUDA 12.4")
        assert (row["Build"], row["Computes"], told.failed) == ("b11146 vulkan", "yes, as Vulkan0", False)
        lines = told.lines()
        assert lines[0] == "| GPU | Driver | Build | Computes | llmux | System |"
        assert lines[2].startswith(
            "| NVIDIA Fake 16 GiB | 550.1, CUDA 12.4 | b11146 vulkan | yes, as Vulkan0 | 0.1.0 | Linux "
        )
        assert str(machine.folder) not in "\n".join(lines)
        assert os.uname().nodename not in "\n".join(lines)

    def test_none_is_installed(self, machine):
        told = gpu_report.report(machine.said.append)
        assert told.failed
        assert "no build for a GPU is installed: llmux runtimes install llama_server" in told.details

    def test_without_a_gpu(self, machine, monkeypatch):
        monkeypatch.delenv("LLMUX_FAKE_NVML")
        with pytest.raises(InstallError, match="There is no GPU to report on"):
            gpu_report.report(machine.said.append)


class TestFetching:
    """A release's file comes whole and as it must be, or not at all, and the error says what to do."""

    def test_a_cut_download_goes_on(self, machine):
        machine.releases.cut_after = 1 << 20
        said = machine.install()
        assert "broken off at 1048576 of" in said
        assert len([path for path in machine.releases.asked if path.endswith("vulkan-x64.tar.gz")]) == 2
        assert machine.used() == (PINNED, "vulkan")

    def test_from_another_host(self, machine):
        machine.releases.elsewhere = machine.releases.url.replace("127.0.0.1", "localhost")
        machine.install()
        assert machine.used() == (PINNED, "vulkan")

    @pytest.mark.parametrize(
        ("fault", "told"),
        [
            ("limited", "has had too many requests from here; try again in 60 s"),
            ("missing", "the release has no llama-b11146-bin-ubuntu-vulkan-x64.tar.gz"),
            ("changed", "came with another sha256 than it must have"),
        ],
    )
    def test_what_keeps_it_away(self, machine, fault, told):
        files = machine.releases.files[PINNED]
        (name,) = files
        if fault == "limited":
            machine.releases.limited = True
        elif fault == "missing":
            del files[name]
        else:
            files[name] = files[name][:-1] + b"\0"
        said = machine.install()
        assert told in said
        assert machine.used() == (None, None), "the processor's is there"


class TestBuilds:
    """Another build is installed only by name; builds stand side by side."""

    def test_there_and_back(self, machine):
        machine.install()
        said: list[str] = []
        environments.update(NAME, machine.runtimes, said.append, Wanted(OTHER))
        assert machine.used() == (OTHER, "vulkan")
        assert f"/tags/{OTHER}" in machine.releases.asked
        noted = json.loads((machine.runtimes / f"{NAME}.digests.json").read_text())
        assert list(noted) == [f"llama-{OTHER}-bin-ubuntu-vulkan-x64.tar.gz"]
        machine.releases.asked.clear()
        environments.update(NAME, machine.runtimes, said.append, Wanted(PINNED))
        assert machine.used() == (PINNED, "vulkan")
        assert not machine.releases.asked
        assert [link.name for link in venvs.build_links(NAME, machine.runtimes)] == [
            f"{NAME}@{PINNED}",
            f"{NAME}@{OTHER}",
        ]
        row = environments.row(NAME, machine.runtimes, check=False)
        assert (row["build"], row["builds"]) == (PINNED, [PINNED, OTHER])
        assert venvs.remove(NAME, machine.runtimes, build=OTHER)
        assert [link.name for link in venvs.build_links(NAME, machine.runtimes)] == [f"{NAME}@{PINNED}"]
        assert machine.used() == (PINNED, "vulkan")

    def test_an_older_one_of_ours_takes_no_newer_ones_place(self, machine):
        machine.install(build=OTHER)
        environments.update(NAME, machine.runtimes, machine.said.append, Wanted())
        assert f"{OTHER} is used, and this llmux knows none newer" in machine.said[-1]
        assert machine.used() == (OTHER, "vulkan")

    def test_what_was_noted_counts(self, machine):
        machine.releases.wrong_digest = True
        with pytest.raises(InstallError, match="No build was installed") as raised:
            machine.install(build=OTHER)
        assert "came with another sha256" in raised.value.detail[0]

    @pytest.mark.parametrize("build", ["latest", "b1/../x", "11400"])
    def test_no_build(self, machine, build):
        with pytest.raises(InvalidRequestError, match="is no build of"):
            machine.install(build=build)

    def test_one_that_is_not_there(self, machine):
        with pytest.raises(InstallError) as raised:
            machine.install(build="b1")
        assert "llama.cpp has no release b1" in raised.value.detail[0]

    def test_a_model_of_a_build(self, machine, tmp_path):
        config = LlamaServerAdapter.config(runtime=NAME, path=tiny.model(name="tiny-chat"), build=PINNED)
        adapter = REGISTRY.get(NAME)
        assert adapter.kinds(config, runtimes_dir=machine.runtimes) is None
        machine.install()
        assert adapter.kinds(config, runtimes_dir=machine.runtimes) == {"cuda", "rocm", "vulkan"}


class TestCarried:
    """An archive that was carried here is checked like one that was fetched, and asks nobody."""

    def test_a_known_one(self, machine, archives):
        machine.install(files=(archives["pinned"],))
        assert machine.used() == (PINNED, "vulkan")
        assert not machine.releases.asked

    def test_a_changed_one(self, machine, archives, tmp_path):
        changed = tmp_path / archives["pinned"].name
        changed.write_bytes(archives["pinned"].read_bytes() + b"\0")
        with pytest.raises(InstallError, match="it was damaged or changed"):
            machine.install(files=(changed,), agreed=lambda _question: True)

    def test_an_unknown_one_needs_a_yes(self, machine, archives):
        with pytest.raises(InstallError, match="compare its sha256"):
            machine.install(files=(archives["other"],))
        machine.install(files=(archives["other"],), agreed=lambda _question: True)
        assert machine.used() == (OTHER, "vulkan")

    def test_one_of_another_name(self, machine, tmp_path):
        (tmp_path / "llama.tar.gz").write_bytes(b"")
        with pytest.raises(InvalidRequestError, match="its name doesn't say which build it is"):
            machine.install(files=(tmp_path / "llama.tar.gz",))


class TestUnpacking:
    """Nothing of an archive lands outside its folder, and it can't fill the disk."""

    @pytest.mark.parametrize(
        ("name", "kind", "target"),
        [
            ("../out", tarfile.REGTYPE, ""),
            ("/out", tarfile.REGTYPE, ""),
            ("top/a/../../../out", tarfile.REGTYPE, ""),
            ("top/lib.so", tarfile.SYMTYPE, "/etc/passwd"),
            ("top/lib.so", tarfile.SYMTYPE, "../../out"),
            ("top/lib.so", tarfile.LNKTYPE, "/etc/passwd"),
            ("top/null", tarfile.CHRTYPE, ""),
            ("top/pipe", tarfile.FIFOTYPE, ""),
        ],
    )
    def test_hostile_members(self, tmp_path, name, kind, target):
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        with pytest.raises(ReleaseError):
            unpack(self.archive(tmp_path, (member, b"")), tmp_path / "in" / "side")
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "in" / "out").exists()

    def test_nothing_is_written_through_a_link(self, tmp_path):
        link, file = tarfile.TarInfo("top/name"), tarfile.TarInfo("top/name")
        link.type, link.linkname = tarfile.SYMTYPE, "other"
        file.size = 4
        with pytest.raises(ReleaseError, match="can't be unpacked"):
            unpack(self.archive(tmp_path, (link, b""), (file, b"evil")), tmp_path / "side")
        assert not (tmp_path / "side" / "other").exists()

    @pytest.mark.parametrize(("bound", "most"), [("MOST_FILES", 3), ("MOST_BYTES", 30)])
    def test_bounds(self, tmp_path, monkeypatch, bound, most):
        monkeypatch.setattr(f"supervisor.host.environments.archives.unpack.{bound}", most)
        members = [(tarfile.TarInfo(f"top/{number}"), b"x" * 10) for number in range(4)]
        for member, content in members:
            member.size = len(content)
        with pytest.raises(ReleaseError, match="more in it than"):
            unpack(self.archive(tmp_path, *members), tmp_path / "side")

    @pytest.mark.parametrize("content", [b"", b"not an archive", b"\x1f\x8b\x08\x00 broken"])
    def test_no_archive(self, tmp_path, content):
        (tmp_path / "a.tar.gz").write_bytes(content)
        with pytest.raises(ReleaseError):
            unpack(tmp_path / "a.tar.gz", tmp_path / "side")

    def test_links_between_its_libraries_stay(self, tmp_path, archives):
        unpack(archives["pinned"], tmp_path / "side")
        assert (tmp_path / "side" / "libllama.so").is_symlink()
        assert needs([tmp_path / "side" / "libllama.so"]).libraries >= {"libggml.so.0", "libc.so.6"}

    def archive(self, folder: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
        path = folder / "a.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for member, content in members:
                tar.addfile(member, io.BytesIO(content))
        return path


class TestNeeds:
    """What the files need of the system is read from them, and named with its package before anything is started."""

    def test_the_compiled_program(self):
        found = build_llama_server.built()
        assert found is not None
        told = needs(path for path in found.parent.iterdir() if path.is_file())
        assert {"libc.so.6", "libgomp.so.1", "libstdc++.so.6"} <= told.libraries
        assert told.glibc >= (2, 17)

    def test_a_library_that_is_missing(self, machine, tmp_path, archives):
        """A plugin that needs what no system has: a copy of a real library, of which one need was renamed."""
        found = build_llama_server.built()
        assert found is not None
        stub = next(found.parent.glob("libggml-cpu*.so*")).resolve().read_bytes()
        stub = stub.replace(b"libgomp.so.1\0", b"libgone.so.1\0")
        (tmp_path / "more").mkdir()
        path = fake_releases.archive(tmp_path / "more", PINNED, "vulkan", world=WORLD, extra={"libggml-stub.so": stub})
        machine.releases.add(PINNED, path)
        machine.releases.pins(machine.folder / "pins.json", PINNED)
        said = machine.install()
        assert "libgone.so.1 is missing" in said
        assert machine.used() == (None, None)

    def test_a_damaged_file(self, tmp_path):
        (tmp_path / "lib.so").write_bytes(b"\x7fELF\x02\x01" + b"\xff" * 100)
        assert needs([tmp_path / "lib.so"]).libraries == frozenset()


def test_what_is_refused_with_an_accelerator(tmp_path):
    with pytest.raises(InvalidRequestError, match="not both"):
        environments.install(NAME, tmp_path, lambda _line: None, device="cuda", wanted=Wanted(PINNED))
    with pytest.raises(InvalidRequestError, match="has no builds"):
        environments.install("embeddings", tmp_path, lambda _line: None, wanted=packages.Wanted(PINNED))
