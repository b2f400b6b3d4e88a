from __future__ import annotations

from dataclasses import fields, replace

from runtimes.base import Endpoint
from supervisor.catalog import Rewrite, check_devices
from supervisor.catalog.sections import LimitsConfig
from supervisor.core.types import DeviceSpec, Eviction, Footprint, FootprintSource, Limits
from supervisor.proxy.json_body import open_object

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


class TestSpecs:
    """What the core learns of a model."""

    def test_spec(self, folder):
        text = "models: {m: {cmd: x, type: tts, pin: true, target_inflight: 3, devices: [host], estimated_mib: 70}}"
        catalog = folder.load(text)
        model = catalog.models["m"]
        (spec,) = catalog.model_specs({(model.footprint_key, "gpu0"): 42, ("other", "host"): 1})
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

    def test_parts(self, folder):
        """Several GPUs share what is estimated or configured; host memory takes all; what was learned is a part's."""
        catalog = folder.load("models: {m: {cmd: x, gpus: 3, estimated_mib: 100}, n: {cmd: x, gpus: 2, vram_mib: 70}}")
        m, n = catalog.model_specs({(catalog.models["m"].footprint_key, "gpu1"): 40})
        gpu, host = DeviceSpec("gpu0", 2000, 0), DeviceSpec("host", 2000, 0, takes_whole=True)
        assert [gpu.need(m).mib, replace(gpu, id="gpu1").need(m).mib, host.need(m).mib] == [34, 40, 100]
        assert gpu.need(m).detail == "one of 3 parts of 100 MiB: as told"
        assert [gpu.need(n).mib, host.need(n).mib] == [35, 70]

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
        (spec,) = folder.load("models: {m: {cmd: x, grace_s: 7}}").model_specs({(plain.footprint_key, "host"): 42})
        assert (DeviceSpec("host", 2000, 0).need(spec).mib, spec.footprint_key) == (42, plain.footprint_key)

    def test_limits_are_those_of_the_core(self, folder):
        assert Limits() == LimitsConfig().limits()
        assert {field.name for field in fields(Limits)} <= set(LimitsConfig.model_fields)
        policy = folder.load("limits: {eviction: strict, max_loaded: {llm: 1}}").limits.policy()
        assert (policy.eviction, policy.max_loaded) == (Eviction.STRICT, {"llm": 1})


class TestCheckDevices:
    """A model that no device can hold is refused at once, unless its size is only a guess."""

    HOST = DeviceSpec("host", total_mib=1000, margin_mib=100)
    GPU = DeviceSpec("gpu0", total_mib=2000, margin_mib=512)

    def test_too_large(self, folder):
        catalog = folder.load("models:\n  fits: {cmd: x, vram_mib: 1488}\n  large: {cmd: x, vram_mib: 1489}\n")
        assert check_devices(catalog, [self.HOST, self.GPU], catalog.model_specs()) == (
            (
                "llmux.yaml:3:19 models.large.vram_mib: takes 1489 MiB (explicit: vram_mib of the configuration), "
                "more than any device it may run on; gpu0 has 1488 MiB after its margin"
            ),
        )

    def test_only_where_it_may_run(self, folder):
        catalog = folder.load("models:\n  m: {cmd: x, estimated_mib: 1000, devices: [host]}\n")
        (problem,) = check_devices(catalog, [self.HOST, self.GPU], catalog.model_specs())
        assert problem.startswith("llmux.yaml:2:3 models.m: takes 1000 MiB (computed: as told)")
        assert (
            check_devices(catalog, [self.HOST], catalog.model_specs({(catalog.models["m"].footprint_key, "host"): 5}))
            == ()
        )

    def test_guesses_refuse_nothing(self, folder):
        catalog = folder.load("models: {m-70b: {cmd: x}, n: {cmd: x}}")
        assert check_devices(catalog, [self.HOST], catalog.model_specs()) == ()

    def test_parts_that_fit_on_too_few(self, folder):
        catalog = folder.load("models:\n  m:\n    {cmd: x, gpus: 2, vram_mib: 2900}\n")
        one, two = replace(self.GPU, id="gpu1", total_mib=1000), replace(self.GPU, id="gpu2")
        assert check_devices(catalog, [self.GPU, two], catalog.model_specs()) == ()
        assert check_devices(catalog, [self.GPU], catalog.model_specs()) == (
            "llmux.yaml:3:14 models.m.gpus: 2 GPUs share the model, and it may run on 1",
        )
        assert check_devices(catalog, [self.GPU, one], catalog.model_specs()) == (
            (
                "llmux.yaml:3:23 models.m.vram_mib: 2 GPUs share the model; its part, 1450 MiB (explicit: one of 2 parts of "
                "2900 MiB: vram_mib of the configuration), fits on gpu0 only"
            ),
        )
        three = folder.load("models:\n  m:\n    {cmd: x, gpus: 3, vram_mib: 4350}\n")
        (problem,) = check_devices(three, [self.GPU, one, two], three.model_specs())
        assert problem.endswith("fits on gpu0 and gpu2 only")

    def test_a_measurement_never_makes_it_too_large(self, folder):
        """It was made where the model ran, beyond the margin, and on the larger of two cards beyond the smaller one."""
        catalog = folder.load(
            "models:\n  m: {cmd: x, estimated_mib: 1400}\n  s: {cmd: x, estimated_mib: 800, gpus: 2}\n"
        )
        small = replace(self.GPU, id="gpu1", total_mib=1000)
        keys = {name: model.footprint_key for name, model in catalog.models.items()}
        learned = {(keys["m"], "gpu0"): 1500, (keys["s"], "gpu0"): 900, (keys["s"], "gpu1"): 300}
        assert check_devices(catalog, [self.GPU, small], catalog.model_specs(learned)) == ()

    def test_unknown_device(self, folder):
        catalog = folder.load("models:\n  m: {cmd: x, devices: [gpu7]}\n")
        assert (check_devices(catalog, [self.HOST], catalog.model_specs())) == (
            "llmux.yaml:2:15 models.m.devices: no device gpu7 here; there is: host",
        )
