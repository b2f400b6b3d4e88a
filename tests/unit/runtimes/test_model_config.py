"""Keys that every model has."""

from __future__ import annotations

from runtimes.registry import REGISTRY
from tests.support.cases import cases

LARGE = {
    "llama_server": ({"path": "/m.gguf"}, {"extra_args": ["--split-mode", "row"]}),
    "llama_cpp": ({"path": "/m.gguf"}, {}),
    "transformers": ({"path": "/m"}, {"device_map": "cpu"}),
    "exllamav3": ({"path": "/m"}, {"gpu_split": [16, 24]}),
    "tabbyapi": ({"path": "/m", "folder": "/t"}, {}),
}


class TestGpus:
    """Where whole layers go on a GPU, a model may go over several unless something says otherwise."""

    @cases("runtime", LARGE)
    def test_auto_where_a_runtime_divides_by_what_is_free(self, runtime):
        adapter = REGISTRY.get(runtime)
        keys, placing = LARGE[runtime]

        def gpus(**more: object) -> object:
            return adapter.config.model_validate({"runtime": runtime, **keys, **more}, strict=False).gpus

        assert adapter.divides
        assert gpus() == "auto"
        assert gpus(gpus=2) == 2
        assert gpus(**placing) == (1 if placing else "auto")

    def test_speech_recognition_uses_one(self):
        config = REGISTRY.get("transformers").config
        keys = {"runtime": "transformers", "path": "/m", "type": "asr"}
        assert config.model_validate(keys, strict=False).gpus == 1

    def test_one_everywhere_else(self):
        others = {name for name in REGISTRY.names() if name not in LARGE}
        assert {REGISTRY.get(name).config.model_fields["gpus"].default for name in others} == {1}


def test_the_order_of_keys_is_that_of_earlier_versions():
    """A model's fingerprint depends on it: in another order, an upgrade would load and measure all such models again."""
    for runtime in ("transformers", "faster_whisper", "ctranslate2", "embeddings", "exllamav3"):
        keys = [*REGISTRY.get(runtime).config.model_fields]
        assert keys.index("parallel") < keys.index("threads"), runtime
