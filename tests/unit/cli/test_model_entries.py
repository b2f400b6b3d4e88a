"""The configuration file that `add` and `remove` change."""

from __future__ import annotations

import pytest

from runtimes.device_kind import CUDA, HOST
from supervisor.cli.models import hub_models, model_entries
from supervisor.cli.models.hub_models import Reference, Variant
from supervisor.core.types import DeviceId
from supervisor.errors import ConfigError
from supervisor.host.memory.memory import DeviceInfo

GPU = DeviceInfo(DeviceId("gpu0"), CUDA, "NVIDIA GeForce RTX 4080", 16376, 512)
PROCESSOR = DeviceInfo(DeviceId("host"), HOST, "processor and RAM", 16000, 0)


class TestOffer:
    """A GPU gets the largest quantisation that fits, a processor the one that it computes quickly."""

    @pytest.mark.parametrize(
        ("device", "labels", "taken", "head"),
        [
            (GPU, ("BF16", "Q8_0", "Q4_K_M", "Q2_K"), "Q8_0", "FITS ON RTX 4080 (gpu0)"),
            (PROCESSOR, ("BF16", "Q8_0", "Q4_K_M", "Q2_K"), "Q4_K_M", "FITS ON processor and RAM (host)"),
            (PROCESSOR, ("Q8_0", "Q2_K"), "Q8_0", "FITS ON processor and RAM (host)"),
        ],
    )
    def test_taken(self, folder, monkeypatch, device, labels, taken, head):
        variants = [Variant(label, (), need_mib=9000 - index) for index, label in enumerate(labels)]
        monkeypatch.setattr(hub_models, "variants", lambda _wanted: variants)
        monkeypatch.setattr(model_entries, "_machine_devices", lambda _catalog: [device])
        found = model_entries.offer(model_entries.target(folder.path / "llmux.yaml").catalog, Reference("o/r"))
        assert found.taken.label == taken
        assert bool(found.why) == (taken == "Q4_K_M")
        assert found.table().rows[0][-1] == head


class TestTarget:
    """What it may be, and where it lies."""

    def test_no_text(self, folder):
        path = folder.path / "llmux.yaml"
        path.write_bytes(b"models: {}  # caf\xe9\n")
        with pytest.raises(ConfigError, match="not UTF-8"):
            model_entries.target(path)

    def test_a_link_to_what_is_not_there_yet(self, folder):
        (folder.path / "llmux.yaml").symlink_to("real/mine.yaml")
        place = model_entries.target(folder.path / "llmux.yaml")
        place.write("models: {}\n")
        assert (folder.path / "real/mine.yaml").read_text() == "models: {}\n"
