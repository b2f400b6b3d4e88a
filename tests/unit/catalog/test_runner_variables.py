"""The variables by which other runners' containers are configured: what each means, and what counts more."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.catalog.document.document import plain
from supervisor.catalog.loading.loader import load
from supervisor.catalog.loading.runner_variables import VARIABLES, VLLM, read_variables
from supervisor.core.admission.limits import Rate, TenantLimits
from supervisor.errors import ConfigError
from tests.support import hf_folder
from tests.support.cases import cases


def read(**variables: str):
    return read_variables({name.replace("__", "-"): value for name, value in variables.items()}, Path("/"))


class TestEach:
    """What its value means here."""

    def test_all_limits(self):
        root, problems = read(
            MAX_QUEUE_DEPTH="16",
            QUEUE_TIMEOUT_MS="1500",
            DEFAULT_RATE_LIMIT="100req/min",
            TENANT_RATE_LIMIT_community__x="7req/min",
            TENANT_RATE_LIMIT_Community="8/s",
            TENANT_RATE_LIMITER="9",
            MAX_QUEUE_DEPTHS="17",
        )
        assert problems == []
        assert plain(root) == {
            "limits": {"queue_total": 16, "queue_wait_s": 1.5},
            "clients": {
                "default": {"request_rate": "100req/min"},
                "Community": {"request_rate": "8/s"},
                "community-x": {"request_rate": "7req/min"},
            },
        }

    @cases(
        ("name", "text", "expected"),
        [
            ("CUDA_VISIBLE_DEVICES", "0", {"devices": [{"kind": "cuda", "index": 0}]}),
            ("CUDA_VISIBLE_DEVICES", "", {"devices": [{"kind": "host"}]}),
            ("CUDA_VISIBLE_DEVICES", "-1", {"devices": [{"kind": "host"}]}),
            ("CUDA_VISIBLE_DEVICES", "1,-1,0", {"devices": [{"kind": "cuda", "index": 1}]}),
            (
                "CUDA_VISIBLE_DEVICES",
                "GPU-6f1e2d3c, 2",
                {"devices": [{"kind": "cuda", "uuid": "GPU-6f1e2d3c"}, {"kind": "cuda", "index": 2}]},
            ),
            ("LLM_POOL_SETTINGS_PATH", "/x", {"server": {"responses": "llm-pool"}}),
            ("MODEL_BASE_PATH", "/models", {"server": {"model_base_path": "/models"}}),
            ("ENABLE_MULTI_TENANT", "true", {"server": {"multi_tenant": True}}),
            ("ENABLE_MULTI_TENANT", "False", {"server": {"multi_tenant": False}}),
            ("VERIFIED_OP_TOKEN_KEY_PATH", "/k", {"server": {"governance": {"key_file": "/k"}}}),
            ("LOG_LEVEL", "WARN", {"server": {"log_level": "warning"}}),
            ("LOG_LEVEL", "info", {"server": {"log_level": "info"}}),
            ("LOG_LEVEL", "TRACE", {"server": {"log_level": "debug"}}),
            ("LOG_LEVEL", "critical", {"server": {"log_level": "error"}}),
            ("LOG_FORMAT", "json", {"server": {"log_format": "json"}}),
            ("LOG_FORMAT", "text", {"server": {"log_format": "console"}}),
            ("ENABLE_METRICS", "0", {"server": {"metrics": False}}),
            ("METRICS_PORT", "9090", {"server": {"metrics_port": 9090}}),
        ],
    )
    def test_means(self, name, text, expected):
        root, problems = read(**{name: text})
        assert (plain(root), problems) == (expected, [])

    def test_of_two_for_everybody_the_tenants_own_counts(self):
        root, _ = read(DEFAULT_RATE_LIMIT="100req/min", TENANT_RATE_LIMIT_default="50req/min")
        assert plain(root) == {"clients": {"default": {"request_rate": "50req/min"}}}

    @pytest.mark.parametrize("text", ["", " "])
    def test_an_empty_one_says_nothing(self, text):
        names = [*(VARIABLES.keys() - {"CUDA_VISIBLE_DEVICES"}), "TENANT_RATE_LIMIT_x"]
        assert plain(read(**dict.fromkeys(names, text))[0]) == {}

    @cases(
        ("name", "text", "expected"),
        [
            ("QUEUE_TIMEOUT_MS", "soon", "expected a whole number of milliseconds, got 'soon'"),
            ("QUEUE_TIMEOUT_MS", "²", "expected a whole number of milliseconds, got '²'"),
            ("ENABLE_METRICS", "maybe", "expected true or false, got 'maybe'"),
            ("ENABLE_MULTI_TENANT", "2", "expected true or false, got '2'"),
            ("CUDA_VISIBLE_DEVICES", "all", "expected GPUs by number or UUID, such as 0,1 or GPU-6f1e2d3c, got 'all'"),
            ("CUDA_VISIBLE_DEVICES", "MIG-1", "expected GPUs by number or UUID"),
        ],
    )
    def test_mistakes_are_told(self, name, text, expected):
        root, (problem,) = read(**{name: text})
        assert plain(root) == {}
        assert str(problem).startswith(f"{name}: {expected}")


class TestOrder:
    """A file counts more than these variables, these less than `LLMUX_…`."""

    @pytest.fixture(autouse=True)
    def _variables(self, monkeypatch):
        monkeypatch.setenv("MAX_QUEUE_DEPTH", "16")
        monkeypatch.setenv("QUEUE_TIMEOUT_MS", "2000")
        monkeypatch.setenv("TENANT_RATE_LIMIT_x", "2/s")

    def test_alone(self, folder):
        catalog = folder.load("models: {}")
        assert (catalog.limits.queue_total, catalog.limits.queue_wait_s) == (16, 2.0)
        assert catalog.client("x").tenant_limits == TenantLimits(Rate(2, 1.0))
        assert str(catalog.origin("limits", "queue_total")) == "MAX_QUEUE_DEPTH"

    def test_a_file_wins_key_by_key(self, folder):
        catalog = folder.load("limits: {queue_total: 15}\nclients: {x: {concurrency: 3}}")
        assert (catalog.limits.queue_total, catalog.limits.queue_wait_s) == (15, 2.0)
        assert catalog.client("x").tenant_limits == TenantLimits(Rate(2, 1.0), None, 3)

    def test_who_names_the_devices(self, folder, monkeypatch):
        assert folder.load("models: {}").devices_variable == ""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert folder.load("models: {}").devices_variable == "CUDA_VISIBLE_DEVICES"
        assert folder.load("devices: auto").devices_variable == ""

    def test_null_in_a_file_lifts_a_limit(self, folder, monkeypatch):
        monkeypatch.setenv("DEFAULT_RATE_LIMIT", "1/s")
        catalog = folder.load("clients: {x: {request_rate: null}}")
        assert not catalog.client("x").tenant_limits
        assert catalog.client("y").tenant_limits == TenantLimits(Rate(1, 1.0))

    def test_a_section_without_keys_says_nothing(self, folder):
        assert folder.load("limits:\nmodels: {}").limits.queue_total == 16

    def test_our_own_variables_win(self, folder, monkeypatch):
        monkeypatch.setenv("LLMUX_LIMITS__QUEUE_TOTAL", "17")
        assert folder.load("models: {}").limits.queue_total == 17

    def test_mistakes_name_their_variable(self, folder, monkeypatch):
        monkeypatch.setenv("MAX_QUEUE_DEPTH", "0")
        monkeypatch.setenv("TENANT_RATE_LIMIT_x", "lots")
        monkeypatch.setenv("LOG_LEVEL", "loud")
        monkeypatch.setenv("METRICS_PORT", "web")
        monkeypatch.setenv("VLLM_ENABLE_PREFIX_CACHING", "perhaps")
        with pytest.raises(ConfigError) as caught:
            folder.load("models: {}")
        told = {problem.split()[0].rstrip(":"): problem for problem in caught.value.problems}
        assert told["MAX_QUEUE_DEPTH"].startswith("MAX_QUEUE_DEPTH limits.queue_total: expected at least 1")
        assert "100/min, 5/s or 1000/h" in told["TENANT_RATE_LIMIT_x"]
        assert "server.log_level: expected" in told["LOG_LEVEL"]
        assert "server.metrics_port: expected a whole number" in told["METRICS_PORT"]
        assert "expected true or false, got 'perhaps'" in told["VLLM_ENABLE_PREFIX_CACHING"]


class TestVllm:
    """`VLLM_…` are defaults of every vllm_serve model, and of no other."""

    @pytest.fixture(autouse=True)
    def _variables(self, monkeypatch):
        for name, text in zip(VLLM, ["false", "2048", "0.9"], strict=True):
            monkeypatch.setenv(name, text)

    def models(self, tmp_path, text):
        folder = hf_folder.write(tmp_path / "model")
        (tmp_path / "llmux.yaml").write_text(text.replace("FOLDER", str(folder)))
        catalog = load(tmp_path / "llmux.yaml", check_files=False)
        return catalog, {name: model.config for name, model in catalog.models.items()}

    def test_what_a_model_leaves_open(self, tmp_path):
        catalog, models = self.models(
            tmp_path,
            """
            models:
              a: {runtime: vllm_serve, path: FOLDER}
              b: {runtime: vllm_serve, path: FOLDER, max_model_len: 1024, vram_mib: 9000}
              c: {runtime: llama_server, path: /c.gguf}
            """,
        )
        assert (models["a"].max_model_len, models["a"].enable_prefix_caching) == (2048, False)
        assert (models["b"].max_model_len, models["b"].gpu_memory_utilization) == (1024, 0.9)
        assert "gpu_memory_utilization" not in models["a"].model_fields_set, "it would size nothing"
        assert str(catalog.origin("models", "a", "max_model_len")) == "VLLM_MAX_MODEL_LEN"
        assert str(catalog.origin("models", "b", "max_model_len")).startswith(str(tmp_path))

    def test_mistakes_name_their_variable(self, tmp_path, monkeypatch):
        monkeypatch.setenv("VLLM_MAX_MODEL_LEN", "long")
        with pytest.raises(ConfigError, match=r"VLLM_MAX_MODEL_LEN models\.a\.max_model_len: expected a whole number"):
            self.models(tmp_path, "models: {a: {runtime: vllm_serve, path: FOLDER}}")


class TestBasePath:
    """`MODEL_BASE_PATH` bounds the files of models, links followed."""

    @pytest.fixture(autouse=True)
    def _base(self, tmp_path, monkeypatch):
        (tmp_path / "models").mkdir()
        monkeypatch.setenv("MODEL_BASE_PATH", str(tmp_path / "models"))

    def load(self, tmp_path, text):
        (tmp_path / "llmux.yaml").write_text(text)
        return load(tmp_path / "llmux.yaml", check_files=False)

    def outside(self, tmp_path, text):
        """What is said of files that lie elsewhere."""
        (tmp_path / "llmux.yaml").write_text(text)
        try:
            load(tmp_path / "llmux.yaml")  # the files aren't there, either
        except ConfigError as error:
            return [problem for problem in error.problems if "is not below" in problem]
        return []

    def test_below(self, tmp_path):
        text = "models: {a: {path: models/a.gguf, lora: [models/deep/er.gguf]}}"
        assert self.outside(tmp_path, text) == []
        assert self.load(tmp_path, text).server.models_dir == tmp_path / "models"

    def test_what_is_fetched_lies_below(self, tmp_path):
        text = "models: {a: {runtime: llama_server, source: {repo: org/a, files: [a.gguf]}}}"
        assert self.load(tmp_path, text).models["a"].config.path == tmp_path / "models/org/a/a.gguf"
        assert self.outside(tmp_path, text) == []

    def test_a_folder_for_models_counts_as_configured(self, tmp_path):
        text = (
            "server: {models_dir: other}\nmodels: {a: {runtime: llama_server, source: {repo: org/a, files: [a.gguf]}}}"
        )
        (problem,) = self.outside(tmp_path, text)
        assert f"{tmp_path}/other/org/a/a.gguf is not below {tmp_path}/models (server.model_base_path)" in problem

    @pytest.mark.parametrize(
        ("model", "key"),
        [
            ("{path: /elsewhere/a.gguf}", "path"),
            ("{path: models/../a.gguf}", "path"),
            ("{path: models2/a.gguf}", "path"),
            ("{path: models/link/a.gguf}", "path"),
            ("{path: models/a.gguf, lora: [models/b.gguf, /c.gguf]}", "lora"),
            ("{path: models/a.gguf, mmproj: /c.gguf}", "mmproj"),
            ("{runtime: vllm_serve, model: /elsewhere}", "model"),
        ],
    )
    def test_outside(self, tmp_path, model, key):
        (tmp_path / "models/link").symlink_to(tmp_path)
        (problem,) = self.outside(tmp_path, f"models: {{a: {model}}}")
        assert f"models.a.{key}: " in problem

    def test_a_file_wins(self, tmp_path):
        text = "server: {model_base_path: other}\nmodels: {a: {path: other/a.gguf}}"
        assert self.outside(tmp_path, text) == []
        assert self.load(tmp_path, text).server.model_base_path == tmp_path / "other"
