"""A daemon on a machine with AMD's GPUs: the planner, leases and the loss of a card are as with NVIDIA's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.fake_amd import Amd


@pytest.fixture
def amd(tmp_path) -> Amd:
    """Two cards of 16 GiB."""
    found = Amd(tmp_path / "amd")
    found.gpu(1, vram_mib=16368)
    found.gpu(2, vram_mib=16368, unique=0xABCDEF)
    return found


@pytest.fixture
def daemon(tmp_path, amd):
    models = {name: fake(vram_mib=12000) for name in ("first", "second", "third")}
    config = {"devices": [{"kind": "rocm", "index": 0}, {"kind": "rocm", "index": 1}], "models": models}
    with running(tmp_path, config, env={"LLMUX_AMD_SYS": str(amd.sys)}) as started:
        yield started


def loaded(daemon: Daemon) -> dict[str, str]:
    """The loaded models by device."""
    rows = daemon.get("/v1/admin/gpu-memory").json()["devices"]
    return {row["id"]: lease["model"] for row in rows for lease in row["leases"]}


def visible(daemon: Daemon, model: str) -> dict[bytes, bytes]:
    environ = Path(f"/proc/{daemon.model(model)['worker']['pid']}/environ").read_bytes().split(b"\0")
    entries = dict(entry.split(b"=", 1) for entry in environ if b"=" in entry)
    return {name: entries[name] for name in (b"ROCR_VISIBLE_DEVICES", b"CUDA_VISIBLE_DEVICES")}


def test_each_card_has_its_model_and_a_third_takes_a_place(daemon):
    for name in ("first", "second"):
        assert daemon.chat(name).status_code == 200
    assert sorted(loaded(daemon)) == ["amd0", "amd1"]
    cards = {model: card for card, model in loaded(daemon).items()}
    names = {"amd0": b"0", "amd1": b"GPU-0000000000abcdef"}
    for name in ("first", "second"):
        expected = {b"ROCR_VISIBLE_DEVICES": names[cards[name]], b"CUDA_VISIBLE_DEVICES": b""}
        assert visible(daemon, name) == expected
    assert daemon.chat("third").status_code == 200
    assert len(loaded(daemon)) == 2
    assert "third" in loaded(daemon).values()


def test_memory_that_others_take(daemon, amd):
    """Nobody tells whose it is, but a load starts only on memory that is free."""
    amd.take(1, vram_mib=10000)
    wait_until(lambda: daemon.get("/v1/admin/gpu-memory").json()["devices"][0]["free_mib"] == 6368)
    assert daemon.chat("first").status_code == 200
    assert loaded(daemon) == {"amd1": "first"}


def test_a_card_that_vanishes(daemon, amd):
    assert daemon.chat("first").status_code == 200
    (card,) = loaded(daemon)
    amd.lose(int(card.removeprefix("amd")) + 1)

    def blocked() -> str | None:
        rows = daemon.get("/v1/admin/gpu-memory").json()["devices"]
        return next(row["blocked"] for row in rows if row["id"] == card)

    wait_until(lambda: blocked() == "lost: its folder in /sys is gone")
    assert daemon.chat("second").status_code == 200
    assert loaded(daemon).get(card) != "second"
