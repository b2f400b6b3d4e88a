from __future__ import annotations

from dataclasses import fields, replace

import pytest
import yaml

from runtimes.base import Endpoint
from runtimes.estimate import Estimate
from runtimes.registry import REGISTRY
from runtimes.sizing import Room
from supervisor.catalog import Rewrite, check_devices
from supervisor.catalog.catalog import NOTHING_LEARNED, Learned
from supervisor.catalog.models.fitting import memory_warnings, pins_warning, specs_for_devices
from supervisor.catalog.models.overrides import overridden
from supervisor.catalog.sections.sections import LimitsConfig
from supervisor.core.memory.device_sets import Spread, need_mib, spread
from supervisor.core.types import DeviceId, DeviceSpec, Eviction, Footprint, FootprintSource, Limits
from supervisor.daemon.configuration.sizes import warnings_of
from supervisor.errors import NotFoundError
from supervisor.gateway.body.json_body import open_object
from tests.unit.catalog.conftest import StubAdapter

TWO = """\
models:
  qwen: {cmd: x, insists_on: served}
  whisper: {cmd: x, type: asr}
  hidden: {cmd: x, public: false}
  both: {cmd: x, public: true}
virtual_models:
  fast: {model: qwen, enable_thinking: false, description: quick}
  slow: {model: qwen}
  both-fast: {model: both}
  whisper: {model: whisper}
"""


class TestNames:
    """Virtual models first, then models that none refers to; every name routes."""

    def test_listing(self, folder):
        listing = folder.load(TWO).listing()
        assert [entry.name for entry in listing] == ["fast", "slow", "both-fast", "whisper", "both"]
        assert (listing[0].description, listing[0].model.id) == ("quick", "qwen")

    def test_routes(self, folder):
        catalog = folder.load(TWO)
        assert {name: catalog.route(name).model.id for name in ("fast", "qwen", "hidden", "whisper")} == {
            "fast": "qwen",
            "qwen": "qwen",
            "hidden": "hidden",
            "whisper": "whisper",
        }
        assert catalog.route("fast").model is catalog.route("slow").model
        assert (catalog.route("fst"), catalog.nearest("fst")) == (None, "fast")
        assert Rewrite() == catalog.route("hidden").rewrite
        fields = open_object(b'{"model":"qwen"}')
        catalog.route("qwen").rewrite.apply(fields, Endpoint("/v1/embeddings"))
        assert {key: bytes(value) for key, value in fields.items()} == {"model": b'"served"'}

    def test_a_pin_lasts_when_the_model_is_sized_again(self, folder):
        model = folder.load(TWO).models["qwen"].sized(()).pinned(pin=True)
        again = model.sized(())
        assert (model.config.pin, again.config.pin, again.as_configured.pin) == (True, True, True)


class TestHubIds:
    """What a model is called on the hub is a name, too, where it is the only one."""

    def catalog(self, folder, *, more=""):
        return folder.load(
            "models:\n"
            "  a: {path: a.gguf, source: {repo: Qwen/Qwen3-8B}}\n"
            "  b: {path: b.gguf, source: {repo: org/Twins}}\n"
            "  c: {path: c.gguf, source: {repo: org/Twins}}\n" + more,
            check_files=False,
        )

    def test_of_one(self, folder):
        catalog = self.catalog(folder)
        assert catalog.resolve("Qwen/Qwen3-8B").model.id == "a"
        assert [row.name for row in catalog.listing()] == ["a", "b", "c"], "it is listed once"

    def test_of_several_all_are_named(self, folder):
        catalog = self.catalog(folder)
        assert catalog.route("org/Twins") is None
        with pytest.raises(NotFoundError, match=r"Several come from there: b, c\. Name one of them\."):
            catalog.resolve("org/Twins")

    def test_a_configured_name_counts_more(self, folder):
        catalog = self.catalog(folder, more="virtual_models: {Qwen/Qwen3-8B: {model: b}, org/Twins: {model: a}}")
        assert catalog.resolve("Qwen/Qwen3-8B").model.id == "b"
        assert catalog.resolve("org/Twins").model.id == "a"


class TestSpecs:
    """What the core learns of a model."""

    def test_spec(self, folder):
        text = "models: {m: {cmd: x, type: tts, pin: true, target_inflight: 3, devices: [host], estimated_mib: 70}}"
        catalog = folder.load(text)
        model = catalog.models["m"]
        (spec,) = catalog.model_specs(Learned({(model.footprint_key, "gpu0"): 42, ("other", "host"): 1}))
        assert (
            spec.id,
            spec.type,
            spec.priority,
            spec.pin,
            spec.target_inflight,
            spec.devices,
        ) == ("m", "tts", 200, True, 3, ("host",))
        assert Footprint(70, FootprintSource.COMPUTED, "as told") == spec.footprint
        gpu, host = DeviceSpec("gpu0", 2000, 0), DeviceSpec("host", 2000, 0)
        assert (gpu.need(spec).mib, gpu.need(spec).source) == (42, FootprintSource.LEARNED)
        assert host.need(spec).mib == 70

    @pytest.mark.parametrize(("said", "mib"), [(0, 1), (70.5, 71), (-1, None), (float("nan"), None), (None, None)])
    def test_what_an_adapter_estimates_is_what_can_be_leased(self, folder, monkeypatch, said, mib):
        """A tiny file takes 0 MiB in many a formula."""
        model = folder.load("models: {m: {cmd: x}}").models["m"]
        estimate = None if said is None else Estimate(said, "file_size", "as said")
        monkeypatch.setattr(type(model.adapter), "estimate", lambda *_: estimate)
        footprint = model.spec().footprint
        if mib is None:
            assert footprint.source is FootprintSource.DEFAULT
        else:
            assert footprint == Footprint(mib, FootprintSource.FILE_SIZE, "as said")

    def test_parts(self, folder):
        """Several GPUs share what is estimated or configured; host memory takes all; what was learned is a part's."""
        catalog = folder.load("models: {m: {cmd: x, gpus: 3, estimated_mib: 100}, n: {cmd: x, gpus: 2, vram_mib: 70}}")
        m, n = catalog.model_specs(Learned({(catalog.models["m"].footprint_key, "gpu1"): 40}))
        gpu, host = DeviceSpec("gpu0", 2000, 0), DeviceSpec("host", 2000, 0, takes_whole=True)
        assert [gpu.need(m).mib, replace(gpu, id="gpu1").need(m).mib, host.need(m).mib] == [34, 40, 100]
        assert gpu.need(m).detail == "one of 3 parts of 100 MiB: as told"
        assert [gpu.need(n).mib, host.need(n).mib] == [35, 70]

    def test_in_parts(self, folder):
        """Everything is of the whole: what was measured counts on whichever devices it was, and never makes it too large."""
        catalog = folder.load("models: {m: {cmd: x, gpus: auto, estimated_mib: 3000}}")
        key, (guess,) = catalog.models["m"].footprint_key, catalog.model_specs()
        cards = [DeviceSpec(DeviceId(f"gpu{i}"), 2000, 100) for i in range(3)]
        assert spread(guess, cards) == Spread(("gpu0", "gpu1", "gpu2"), 3000)
        (measured,) = catalog.model_specs(Learned({(key, "gpu0"): 2500, (key, "gpu1"): 2600}))
        assert spread(measured, cards).whole_mib == 2600
        assert need_mib(measured, cards[:1], alone=False) == 2500  # so it doesn't fit there alone
        (raised,) = catalog.model_specs(Learned(raised={(key, "gpu0"): 9000}))
        assert spread(raised, cards).whole_mib == 3 * (1900 - 512)
        assert spread(guess, cards[:1]) is None

    def test_the_load_time_is_that_of_the_same_settings(self, folder):
        catalog = folder.load("models: {m: {cmd: x}, n: {cmd: x, n_ctx: 1}}")
        m, n = catalog.model_specs(Learned(load_s={catalog.models["m"].footprint_key: 4.5}))
        assert (m.load_s, n.load_s) == (4.5, None)

    def test_explicit_priority_and_footprint(self, folder):
        (spec,) = folder.load("models: {m: {cmd: x, priority: 0, vram_mib: 5, estimated_mib: 70}}").model_specs()
        assert (spec.priority, spec.footprint.mib, spec.footprint.source) == (0, 5, FootprintSource.EXPLICIT)

    def test_definition_follows_what_the_worker_is_and_not_how_it_is_scheduled(self, folder):
        plain = folder.load("models: {m: {cmd: x}}").models["m"].definition
        assert plain == folder.load("models: {other: {cmd: x, pin: true, public: false}}").models["other"].definition
        assert plain != folder.load("models: {m: {cmd: x, n_ctx: 1}}").models["m"].definition
        assert plain != folder.load("models: {m: {cmd: x, runtime: llama_server}}").models["m"].definition

    def test_a_change_of_patience_is_another_definition_with_the_same_footprint(self, folder):
        plain, patient = (
            folder.load(f"models: {{m: {{cmd: x, {key}: 7}}}}").models["m"]
            for key in ("pin: false, priority", "grace_s")
        )
        assert plain.definition != patient.definition
        (spec,) = folder.load("models: {m: {cmd: x, grace_s: 7}}").model_specs(
            Learned({(plain.footprint_key, "host"): 42})
        )
        assert (DeviceSpec("host", 2000, 0).need(spec).mib, spec.footprint_key) == (42, plain.footprint_key)

    def test_limits_are_those_of_the_core(self, folder):
        assert Limits() == LimitsConfig().limits()
        assert {field.name for field in fields(Limits)} <= set(LimitsConfig.model_fields)
        policy = folder.load("limits: {eviction: strict, max_loaded: {llm: 1}}").limits.policy()
        assert (policy.eviction, policy.max_loaded) == (Eviction.STRICT, {"llm": 1})


class TestMemoryWarnings:
    """A model larger than its devices, or than `vram_mib` says, is warned of."""

    HOST = DeviceSpec("host", total_mib=1000, margin_mib=100, takes_whole=True)
    GPU = DeviceSpec("gpu0", total_mib=2000, margin_mib=512)

    def warnings(self, catalog, devices, learned=NOTHING_LEARNED):
        """Of every model, by name; and none of them keeps the rest from being served."""
        specs = catalog.model_specs(learned)
        assert check_devices(catalog, devices, specs) == ()
        found = {spec.id: memory_warnings(catalog.models[spec.id], spec, devices) for spec in specs}
        return {name: told for name, told in found.items() if told}

    def test_too_large(self, folder):
        catalog = folder.load("models:\n  fits: {cmd: x, vram_mib: 1488}\n  large: {cmd: x, vram_mib: 1489}\n")
        (told,) = self.warnings(catalog, [self.HOST, self.GPU])["large"]
        assert told.startswith(
            "takes 1489 MiB (explicit: vram_mib of the configuration), more than any device it may run on; "
            "gpu0 has 1488 MiB after its margin; "
        )

    def test_only_where_it_may_run(self, folder):
        catalog = folder.load("models:\n  m: {cmd: x, estimated_mib: 1000, devices: [host]}\n")
        (told,) = self.warnings(catalog, [self.HOST, self.GPU])["m"]
        assert told.startswith("takes 1000 MiB (computed: as told)")
        assert self.warnings(catalog, [self.HOST], Learned({(catalog.models["m"].footprint_key, "host"): 5})) == {}

    def test_parts_that_fit_on_too_few(self, folder):
        catalog = folder.load("models:\n  m:\n    {cmd: x, gpus: 2, vram_mib: 2900}\n")
        one, two = replace(self.GPU, id="gpu1", total_mib=1000), replace(self.GPU, id="gpu2")
        assert self.warnings(catalog, [self.GPU, two]) == {}
        (told,) = self.warnings(catalog, [self.GPU, one])["m"]
        assert told.startswith(
            "2 GPUs share the model; its part, 1450 MiB (explicit: one of 2 parts of 2900 MiB: vram_mib of the "
            "configuration), fits on gpu0 only"
        )
        three = folder.load("models:\n  m:\n    {cmd: x, gpus: 3, vram_mib: 4350}\n")
        assert "fits on gpu0 and gpu2 only" in self.warnings(three, [self.GPU, one, two])["m"][0]

    def test_a_measurement_never_makes_it_too_large(self, folder):
        """It was made where the model ran, beyond the margin, and on the larger of two cards beyond the smaller one."""
        catalog = folder.load(
            "models:\n  m: {cmd: x, estimated_mib: 1400}\n  s: {cmd: x, estimated_mib: 800, gpus: 2}\n"
        )
        small = replace(self.GPU, id="gpu1", total_mib=1000)
        keys = {name: model.footprint_key for name, model in catalog.models.items()}
        learned = Learned({(keys["m"], "gpu0"): 1500, (keys["s"], "gpu0"): 900, (keys["s"], "gpu1"): 300})
        assert self.warnings(catalog, [self.GPU, small], learned) == {}

    def test_less_than_computed(self, folder):
        catalog = folder.load("models: {m: {cmd: x, vram_mib: 700, estimated_mib: 800}}")
        (told,) = self.warnings(catalog, [self.GPU])["m"]
        assert told.startswith("vram_mib is 700, but its files need 800 MiB (as told); raise or remove it")
        assert self.warnings(folder.load("models: {m: {cmd: x, vram_mib: 800, estimated_mib: 800}}"), [self.GPU]) == {}

    def test_less_than_measured(self, folder):
        """A measurement is better than what was computed, and of several GPUs each has a part."""
        catalog = folder.load("models: {m: {cmd: x, vram_mib: 700, estimated_mib: 800}}")
        key = catalog.models["m"].footprint_key
        assert self.warnings(catalog, [self.GPU], Learned({(key, "gpu0"): 650})) == {}
        assert self.warnings(catalog, [self.GPU], Learned({(key, "gpu0"): 900}))["m"] == (
            "vram_mib is 700, but 900 MiB were measured; raise or remove it",
        )
        spread = folder.load("models: {m: {cmd: x, vram_mib: 700, gpus: 2}}")
        learned = Learned({(spread.models["m"].footprint_key, "gpu0"): 400})
        assert (
            "800 MiB were measured" in self.warnings(spread, [self.GPU, replace(self.GPU, id="gpu1")], learned)["m"][0]
        )


class TestSized:
    """What a model leaves open is chosen for the largest place it may have, and again for an override."""

    HOST = DeviceSpec("host", total_mib=64000, margin_mib=0, takes_whole=True)
    SMALL, LARGE = (DeviceSpec(f"gpu{i}", total_mib=mib, margin_mib=100) for i, mib in enumerate((8100, 16100)))

    @pytest.mark.parametrize(
        ("keys", "devices", "room"),
        [
            ("", (), None),
            ("", (HOST,), Room(64000, "host", accelerates=False)),
            ("", (SMALL, LARGE, HOST), Room(16000, "gpu1")),
            (", devices: [gpu0]", (SMALL, LARGE), Room(8000, "gpu0")),
            (", gpus: 2", (SMALL, LARGE, HOST), Room(16000, "gpu1 and gpu0")),
            (", gpus: 3", (SMALL, LARGE, HOST), None),
            (", gpus: auto", (SMALL, LARGE, HOST), Room(16000, "gpu1")),
            (", gpus: auto, estimated_mib: 16001", (SMALL, LARGE, HOST), Room(22976, "its GPUs together")),
            (", gpus: auto, estimated_mib: 16001", (LARGE, HOST), Room(16000, "gpu1")),
            (", vram_mib: 5000", (SMALL,), Room(5000, "vram_mib", is_own=True)),
            (", vram_mib: 9000", (SMALL,), Room(8000, "gpu0")),
        ],
    )
    def test_room(self, folder, keys, devices, room):
        catalog = folder.load(f"models: {{m: {{cmd: x{keys}}}}}\nvirtual_models: {{v: {{model: m}}}}")
        sized = catalog.sized(devices)
        assert sized.models["m"].sizing.why == str(room)
        assert sized.virtual["v"].model is sized.models["m"]

    def test_an_override_is_sized_again(self, folder, tmp_path):
        model = folder.load("models: {m: {cmd: x}}").sized([self.LARGE]).models["m"]
        assert (model.config.layers, model.as_configured.layers) == (16000, "all")
        changed = overridden(model, {"vram_mib": 5000}, runtimes_dir=tmp_path)
        assert changed.config.layers == 5000
        assert overridden(model, {"layers": 7}, runtimes_dir=tmp_path).config.layers == 7


class TestCheckDevices:
    """What keeps the whole from being served."""

    HOST = DeviceSpec("host", total_mib=1000, margin_mib=100)
    GPU = DeviceSpec("gpu0", total_mib=2000, margin_mib=512)

    def test_specs_say_why_a_model_has_no_place(self, folder):
        catalog = folder.load("models: {m: {cmd: x, gpus: 2}, n: {cmd: x}}")
        assert [(spec.id, spec.gpus, spec.trouble) for spec in specs_for_devices(catalog, [self.GPU])] == [
            ("m", 1, "gpus: 2 GPUs share the model, and it may run on 1"),
            ("n", 1, ""),
        ]

    @pytest.mark.parametrize(
        ("spreads", "divides", "keys", "found"),
        [
            (True, True, "", ["gpus: auto lets it go over several GPUs"]),
            (True, True, ", gpus: auto", []),
            (True, False, "", ["gpus: 3 gives each GPU a part that fits"]),
            (True, False, ", devices: [gpu0]", []),
            (False, False, "", ["a worker of command uses one GPU"]),
        ],
    )
    def test_what_helps_one_that_is_too_large(self, folder, monkeypatch, spreads, divides, keys, found):
        monkeypatch.setattr(StubAdapter, "spreads", spreads)
        monkeypatch.setattr(StubAdapter, "divides", divides)
        monkeypatch.setattr(StubAdapter, "offload_key", "layers")
        gpus = [replace(self.GPU, id=DeviceId(f"gpu{number}")) for number in range(3)]
        (spec,) = specs_for_devices(folder.load(f"models: {{m: {{cmd: x, vram_mib: 4400{keys}}}}}"), gpus)
        always = [
            "layers leaves a part of it in the main memory",
            "choose a smaller quantisation or context, or other devices",
        ]
        assert spec.remedy.split("; ") == [*found, *always]

    @pytest.mark.parametrize(
        ("mib", "devices", "crowded"),
        [
            ((800, 600), "", False),
            ((800, 800), "", True),
            ((800, 800), "[gpu0, gpu1]", False),
            ((800, 800, 800), "[gpu0, gpu1]", True),
            ((800, 9000), "", False),  # the second fits nowhere, which is told by itself
        ],
    )
    def test_pins_that_can_not_all_be_kept(self, folder, mib, devices, crowded):
        there = [replace(self.GPU, id=DeviceId(name)) for name in ("gpu0", "gpu1")][: 2 if devices else 1]
        models = {f"m{number}": {"cmd": "x", "vram_mib": one, "pin": True, "gpus": 1} for number, one in enumerate(mib)}
        catalog = folder.load(yaml.safe_dump({"models": {**models, "free": {"cmd": "x", "vram_mib": 1400}}}))
        found = [
            name for name, told in warnings_of(catalog, specs_for_devices(catalog, there), there) if "is pinned" in told
        ]
        assert found == ([f"m{len(mib) - 1}"] if crowded else [])

    @pytest.mark.parametrize(
        ("models", "crowded"),
        [
            ([{"vram_mib": 1200, "gpus": "auto"}, {"vram_mib": 1200, "gpus": "auto"}], None),
            ([{"vram_mib": 1600, "gpus": "auto"}, {"vram_mib": 1400, "gpus": "auto"}], "m1"),
            ([{"vram_mib": 1600, "gpus": "auto"}, {"vram_mib": 1000}], None),
            ([{"vram_mib": 1600, "gpus": "auto"}, {"vram_mib": 1400}], "m1"),
            ([{"vram_mib": 1600, "gpus": 2}, {"vram_mib": 800}], "m1"),
            ([{"vram_mib": 1400, "gpus": 2}, {"vram_mib": 700}], None),
            ([{"vram_mib": 800}, {"vram_mib": 800, "devices": ["gpu1"]}], None),
            ([{"vram_mib": 800, "devices": ["gpu1"]}, {"vram_mib": 800, "devices": ["gpu1"]}], "m1"),
            ([{"vram_mib": 700}] * 4, None),
            ([{"vram_mib": 700}] * 5, "m4"),
        ],
    )
    def test_pins_over_two_gpus(self, folder, models, crowded):
        there = [replace(self.GPU, id=DeviceId(name)) for name in ("gpu0", "gpu1")]  # each with 1488 MiB for models
        folder.write("", "model.gguf")
        entries = {f"m{n}": {"path": "model.gguf", "gpus": 1, "pin": True, **one} for n, one in enumerate(models)}
        catalog = folder.load(yaml.safe_dump({"models": entries}), registry=REGISTRY)
        specs = [replace(spec, trouble="") for spec in specs_for_devices(catalog, there)]  # the file is none
        warning = pins_warning(specs, there)
        assert (None if warning is None else warning[0]) == crowded

    def test_guesses_refuse_nothing(self, folder):
        catalog = folder.load("models: {m-70b: {cmd: x}, n: {cmd: x}}")
        assert check_devices(catalog, [self.HOST], catalog.model_specs()) == ()

    def test_too_few(self, folder):
        catalog = folder.load("models:\n  m:\n    {cmd: x, gpus: 2, vram_mib: 2900}\n")
        assert tuple(map(str, check_devices(catalog, [self.GPU], catalog.model_specs()))) == (
            "llmux.yaml:3:14 models.m.gpus: 2 GPUs share the model, and it may run on 1",
        )

    def test_unknown_device(self, folder):
        catalog = folder.load("models:\n  m: {cmd: x, devices: [gpu7]}\n")
        assert tuple(map(str, check_devices(catalog, [self.HOST], catalog.model_specs()))) == (
            "llmux.yaml:2:15 models.m.devices: no device gpu7 here; there is: host",
        )
