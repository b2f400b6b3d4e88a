"""`GET /metrics` of a real daemon, and the Grafana dashboard that is built on it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from supervisor.api.metrics import together
from supervisor.daemon.observability import metric_table
from tests.support import tiny
from tests.support.daemon import REPOSITORY, fake, gguf, running, wait_until

GRAFANA = REPOSITORY / "deploy" / "grafana"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    models = {
        "tiny": gguf(),
        "a": fake(vram_mib=3000),
        "b": fake(vram_mib=3000),
        "late": fake("--start-delay", "600"),
        "broken": fake("--exit-code", "3", "--log-text", "no such thing"),
    }
    limits = {"crash_limit": 1, "min_residency_s": 0}
    virtual = {"Tiny": {"model": "tiny", "enable_thinking": False}}
    config = {"models": models, "virtual_models": virtual, "limits": limits}
    with running(tmp_path_factory.mktemp("metrics"), config) as daemon:
        yield daemon


def samples(daemon) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = daemon.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(found, name: str, **labels: str) -> float | None:
    return found.get((name, tuple(sorted(labels.items()))))


def told(text: str) -> set[str]:
    """The models whose workers' own metrics are in it: one that takes its time is left out of one answer."""
    return set(re.findall(r'^llamacpp:prompt_tokens_total{model="(\w+)"} [1-9]', text, re.MULTILINE))


class TestMetrics:
    """Everything that happens is counted, under names and units that Prometheus expects."""

    def test_all_of_the_table_are_there(self, daemon):
        """Also the labels of those that have samples."""
        families = {family.name: family for family in text_string_to_metric_families(daemon.get("/metrics").text)}
        for metric in metric_table.ALL:
            family = families[metric.name]
            assert (family.type, family.documentation) == (metric.type, metric.help)
            assert {frozenset(sample.labels) - {"le"} for sample in family.samples} <= {frozenset(metric.labels)}
        ours = {name for name in families if name.startswith(("llmux_", "gen_ai_", "vllm_", "asyncio_"))}
        assert ours == {metric.name for metric in metric_table.ALL}

    def test_requests_tokens_and_times(self, daemon):
        before = value(samples(daemon), "llmux_requests_total", model="Tiny", status="200") or 0
        assert daemon.chat("Tiny").json()["choices"][0]["message"]["content"] == tiny.ANSWER
        with (
            daemon.client() as client,
            client.stream(
                "POST",
                "/v1/chat/completions",
                json={
                    "model": "Tiny",
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "messages": [{"role": "user", "content": "Hello"}],
                },
            ) as stream,
        ):
            stream.read()
        found = samples(daemon)
        assert value(found, "llmux_requests_total", model="Tiny", status="200") == before + 2
        assert value(found, "llmux_completion_tokens_total", model="Tiny") >= 2 * 6
        assert value(found, "llmux_prompt_tokens_total", model="Tiny") > 0
        for name in (
            "llmux_queue_wait_seconds",
            "gen_ai_server_request_duration_seconds",
            "gen_ai_server_time_to_first_token_seconds",
            "llmux_tokens_per_second",
        ):
            assert value(found, f"{name}_count", model="Tiny") >= 2, name
        assert value(found, "gen_ai_server_time_per_output_token_seconds_count", model="Tiny") >= 1
        assert value(found, "llmux_load_seconds_count", model="tiny") == 1
        assert value(found, "llmux_decision_seconds_count") > 0

    def test_tokens_of_streams_that_have_no_usage(self, daemon):
        """Most clients stream and don't ask for `usage`; llama.cpp's last event has its own figures then."""
        daemon.chat("Tiny")
        before = samples(daemon)
        assert daemon.chat("Tiny", stream=True).status_code == 200
        found = samples(daemon)
        for name in ("llmux_completion_tokens_total", "llmux_prompt_tokens_total"):
            assert value(found, name, model="Tiny") > value(before, name, model="Tiny"), name
        record = daemon.events("request.finished")[-1]
        assert record["completion_tokens"] > 0
        whole = daemon.chat("Tiny").json()["usage"]
        assert record["prompt_tokens"] == whole["prompt_tokens"]

    def test_names_that_clients_invent_make_no_series(self, daemon):
        assert daemon.chat("no-such-model-1").status_code == 404
        found = samples(daemon)
        assert value(found, "llmux_requests_total", model="unknown", status="404") >= 1
        assert "no-such-model-1" not in str(found)

    def test_memory_of_devices_and_workers(self, daemon):
        daemon.chat("Tiny")
        found = wait_until(
            lambda: value(s := samples(daemon), "llmux_worker_memory_bytes", model="tiny", device="host") and s
        )
        assert value(found, "llmux_device_total_bytes", device="host") == 4000 * 1024 * 1024
        assert value(found, "llmux_worker_lease_bytes", model="tiny", device="host") > 1024 * 1024
        assert value(found, "llmux_model_state", model="tiny", state="ready") == 1

    def test_swaps_and_evictions(self, daemon):
        for model in ("a", "b"):
            assert daemon.chat(model).status_code == 200
        found = samples(daemon)
        assert value(found, "llmux_swaps_total", model="b") == 1
        assert value(found, "llmux_evictions_total", model="a", reason="room") == 1

    def test_the_daemons_own_process(self, daemon):
        found = samples(daemon)
        assert value(found, "process_open_fds") > 3
        assert value(found, "process_resident_memory_bytes") > 1 << 20
        assert value(found, "asyncio_tasks") >= 1

    def test_crashes_by_class(self, daemon):
        before = samples(daemon)
        assert daemon.chat("broken").status_code == 503
        found = samples(daemon)
        crashes = {key: count - before[key] for key, count in found.items() if key[0] == "llmux_crashes_total"}
        assert sum(crashes.values()) == 1, "its series began at 0 before"

    def test_series_of_requests_begin_at_0(self, daemon):
        """`rate` sees no increase in the first value of a series: the first trouble would be on no panel."""
        before = samples(daemon)
        with contextlib.suppress(httpx.ReadTimeout), daemon.client() as client:  # leaves while it waits
            client.post("/v1/chat/completions", json={"model": "late", "messages": []}, timeout=0.5)
        assert daemon.post("/v1/chat/completions", json={"messages": []}).status_code == 400

        def counted() -> dict[str, float]:
            found = samples(daemon)
            return {
                f"{dict(key[1])['model']} {dict(key[1])['status']}": count - before[key]
                for key, count in found.items()
                if key[0] == "llmux_requests_total" and count != before.get(key)
            }

        wait_until(lambda: counted() == {"late none": 1, "unknown 400": 1})

    def test_workers_own_metrics_bear_their_models_name(self, daemon):
        daemon.chat("Tiny")
        wait_until(lambda: "tiny" in told(daemon.get("/metrics").text))

    def test_needs_the_scope_metrics(self, tmp_path):
        keys = tmp_path / "keys.yaml"
        keys.write_text(
            "- {name: one, key: sk-llmux-inference-0123456789}\n"
            "- {name: two, key: sk-llmux-metrics-0123456789, scopes: [metrics]}\n"
        )
        keys.chmod(0o600)
        with running(tmp_path, {"models": {"a": fake()}, "server": {"api_keys": str(keys)}}) as daemon:
            bearer = "Bearer sk-llmux-{}-0123456789"
            assert daemon.get("/metrics").status_code == 401
            assert daemon.get("/metrics", headers={"authorization": bearer.format("inference")}).status_code == 403
            assert daemon.get("/metrics", headers={"authorization": bearer.format("metrics")}).status_code == 200


TEXTS = {
    "a": b"""\
# HELP tokens_total All of them.
# TYPE tokens_total counter
tokens_total{model="its own",engine="0"} 3
tokens_total 4 1700000000000
# TYPE wait_seconds histogram
wait_seconds_bucket{le="+Inf",} 1
wait_seconds_sum 0.5
wait_seconds_count 1
twice{x="1",x="2"} 1
llmux_requests_total 99
# TYPE llmux_queue_depth gauge
llmux_queue_depth 7
""",
    'b "q"': b"""\
# TYPE tokens_total counter
tokens_total{text="a } brace, a \\\" quote"} 5
not a sample
bad_value 1_000
bad_label{1="x"} 1
open{x="y 1
\xff\xfe 1
# TYPE wait_seconds histogram
wait_seconds_count 2
NaNs nan
""",
}


class TestWorkers:
    """One worker's odd metrics cost nobody the others."""

    def test_together(self):
        text = together(TEXTS.items(), {"llmux_requests_total", "llmux_queue_depth"}).decode()
        assert text.splitlines() == [
            "# HELP tokens_total All of them.",
            "# TYPE tokens_total counter",
            'tokens_total{model="a",exported_model="its own",engine="0"} 3',
            'tokens_total{model="a"} 4 1700000000000',
            'tokens_total{model="b \\"q\\"",text="a } brace, a \\" quote"} 5',
            "# TYPE wait_seconds histogram",
            'wait_seconds_bucket{model="a",le="+Inf"} 1',
            'wait_seconds_sum{model="a"} 0.5',
            'wait_seconds_count{model="a"} 1',
            'wait_seconds_count{model="b \\"q\\""} 2',
            'NaNs{model="b \\"q\\""} nan',
        ]
        families = [family.name for family in text_string_to_metric_families(text)]
        assert families == ["tokens", "wait_seconds", "NaNs"]

    def test_every_metric_is_in_one_place(self, daemon, tmp_path):
        """Two real workers tell the same metrics; Prometheus wants all samples of one together."""
        with running(tmp_path, {"models": {"one": gguf(), "two": gguf()}}) as two:
            assert [two.chat(name).status_code for name in ("one", "two")] == [200, 200]
            text = wait_until(lambda: both if {"one", "two"} <= told(both := two.get("/metrics").text) else None)
        families = [family.name for family in text_string_to_metric_families(text)]
        assert len(families) == len(set(families))


class TestDashboard:
    """Every metric the Grafana dashboard asks for exists, and every one of ours is on it."""

    def test_is_what_its_program_writes(self):
        spec = importlib.util.spec_from_file_location("grafana", GRAFANA / "generate.py")
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        assert json.loads((GRAFANA / "llmux.json").read_text()) == program.dashboard()

    def test_follows_the_interval_that_prometheus_can_answer(self):
        """`$__interval` may be shorter than two scrapes: then a panel is empty."""
        text = (GRAFANA / "llmux.json").read_text()
        assert set(re.findall(r"\[([^\]\d\s]+)\]", text)) == {"$__rate_interval"}

    def test_asks_for_what_is_there(self, daemon):
        dashboard = json.loads((GRAFANA / "llmux.json").read_text())
        queries = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
        asked = set(re.findall(r"\b(?:llmux|gen_ai)_\w+", queries))
        families = {family.name: family for family in text_string_to_metric_families(daemon.get("/metrics").text)}
        ours = {name: family for name, family in families.items() if name.startswith(("llmux_", "gen_ai_"))}
        suffixed = {
            name + suffix
            for name, family in ours.items()
            for suffix in {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}[
                family.type
            ]
        }
        assert asked <= suffixed
        shown = {re.sub(r"_(bucket|total)$", "", name) for name in asked}
        assert set(ours) - shown == {"llmux_build_info"}
