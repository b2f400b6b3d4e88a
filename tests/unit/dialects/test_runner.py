"""The parts of the runner's API that need no daemon: paths, errors, names of models, and their quantisation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from runtimes.prompt_cache import PromptCache
from supervisor.core.events import Configured, ShutdownRequested, UnloadRequested
from supervisor.core.memory.device_ledger import Lease, Phase
from supervisor.core.types import WorkerState
from supervisor.dialects import dialect_of
from supervisor.dialects.runner import RUNNER, flush
from supervisor.dialects.runner.capabilities import RunnerApi
from supervisor.dialects.runner.flush import Outcome
from supervisor.dialects.runner.lifecycle import unload
from supervisor.dialects.runner.models import is_same_quantization, model_of, quantization_of
from supervisor.dialects.runner.operations import GROUP
from supervisor.dialects.runner.types import FlushAll, RunnerLoad
from supervisor.errors import InvalidRequestError, NotFoundError, UnavailableError
from supervisor.gateway.body.typed import Reader, encoded
from tests.support.application import ask, get, serving
from tests.support.cases import cases


def model(name="m", *, source=None, **keys):
    repo = None if source is None else SimpleNamespace(repo=source)
    adapter = SimpleNamespace(known_as=lambda config: (f"whisper-{keys['model']}",) if "model" in keys else ())
    return SimpleNamespace(id=name, config=SimpleNamespace(source=repo, **keys), adapter=adapter)


def daemon(*models):
    known = {one.id: one for one in models}
    route = {one.id: SimpleNamespace(model=one) for one in models}.get
    return SimpleNamespace(catalog=SimpleNamespace(models=known, route=route))


class TestPaths:
    """Its own, with their scopes; a model may be called `load`."""

    @cases(
        ("method", "path", "scope"),
        [
            ("GET", "/v1/capabilities", "inference"),
            ("POST", "/v1/models/load", "admin"),
            ("GET", "/v1/models/load/load-1", "admin"),
            ("GET", "/v1/models/load/pull-1\n", "admin"),
            ("GET", "/v1/models/load/model-a/b", "admin"),
            ("GET", "/v1/models/load/other", "inference"),
            ("POST", "/v1/models/unload", "admin"),
            ("POST", "/v1/cache/flush", "admin"),
        ],
    )
    def test_owned(self, method, path, scope):
        assert dialect_of({"method": method, "path": path, "headers": []}) is RUNNER
        assert RUNNER.scope_for(path) == scope

    @pytest.mark.parametrize(
        ("method", "path"), [("GET", "/v1/models/load"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions")]
    )
    def test_others(self, method, path):
        assert dialect_of({"method": method, "path": path, "headers": []}) is not RUNNER

    def test_error(self):
        fields = {"message": "No.", "type": "x", "param": None, "code": "queue_full", "queueDepth": 16}
        found = msgspec.json.decode(RUNNER.error(fields, 503))
        assert found == {"error": {"code": "queue_full", "message": "No.", "queueDepth": 16}}


class TestModelId:
    """A model's id or public name, else its source, its path or its size."""

    @cases("said", ["m", "org/repo", "/models/m.gguf", "small", "whisper-small"])
    def test_found(self, said):
        found = model(source="org/repo", path=Path("/models/m.gguf"), model="small")
        assert model_of(daemon(found), said) == "m"

    def test_of_several(self):
        twins = daemon(model("a", source="org/repo"), model("b", source="org/repo"))
        with pytest.raises(InvalidRequestError, match="a, b"):
            model_of(twins, "org/repo")

    def test_unknown(self):
        with pytest.raises(NotFoundError):
            model_of(daemon(model()), "nobody")


class TestQuantization:
    """By the configuration, else by the name of a GGUF file."""

    @cases(
        ("keys", "expected"),
        [
            ({"quantization": "awq"}, "awq"),
            ({"quantization": "auto", "dtype": "bfloat16"}, "bf16"),
            ({"path": Path("/m/Qwen3-8B-Q4_K_M.gguf")}, "Q4_K_M"),
            ({"path": Path("/m/Llama-IQ4_XS-00001-of-00003.gguf")}, "IQ4_XS"),
            ({"path": Path("/m/tiny-F16.gguf")}, "fp16"),
            ({"path": Path("/m/Qwen3-8B")}, None),
        ],
    )
    def test_said(self, keys, expected):
        assert quantization_of(model(**keys)) == expected

    @cases(
        ("one", "other", "same"),
        [
            ("awq-4bit", "awq", True),
            ("gptq-4bit", "gptq-int4", True),
            ("gptq-4bit", "gptq-8bit", False),
            ("awq-4bit", "gptq-4bit", False),
            ("fp16", "float16", True),
            ("bf16", "fp16", False),
            ("q4_k_m", "Q4_K_M", True),
            ("Q4_K_M", "Q4_K_S", False),
            ("Q4_0", "Q4_1", False),
            ("bitsandbytes-4bit", "bitsandbytes-8bit", False),
        ],
    )
    def test_compared(self, one, other, same):
        assert is_same_quantization(one, other) is same


class TestLoad:
    """What a request may say of a load."""

    read = staticmethod(Reader(RunnerLoad))

    @cases(
        ("field", "value"),
        [
            *(("modelId", value) for value in (None, "", 5, ["m"], "m" * 600)),
            ("evictModel", ""),
            ("quantization", 4),
            *(
                (name, value)
                for name in ("maxContextLength", "gpuMemoryBudgetMB")
                for value in (0, 1 << 31, True, "1", 1.5)
            ),
        ],
    )
    def test_refused(self, field, value):
        with pytest.raises(InvalidRequestError) as raised:
            self.read(encoded({"modelId": "m", field: value}))
        assert raised.value.param == field

    def test_read(self):
        said = {
            "modelId": "m",
            "gpuMemoryBudgetMB": 1,
            "maxContextLength": (1 << 31) - 1,
            "verifiedOpToken": "e30",
            "a": 1,
        }
        body, ignored = self.read(encoded(said))
        assert (body.gpu_memory_budget_mb, body.max_context_length, ignored) == (1, (1 << 31) - 1, ["a"])


class TestFlush:
    """A scope, and what it needs."""

    @pytest.fixture
    def client(self, monkeypatch):
        """Of two models, of which the first can't be flushed."""

        async def flushed(_daemon, name, _body):
            if name == "stuck":
                raise UnavailableError("Its worker can't be killed.")
            return Outcome("slots_erased", 5)

        rotated = []

        async def rotate(*what):
            rotated.append(what)

        monkeypatch.setattr(flush, "_flush_model", flushed)
        two = daemon(model("stuck"), model("fine"))
        two.catalog.server = SimpleNamespace(governance=None)
        two.cache_salts = SimpleNamespace(rotate=rotate)
        self.rotated = rotated
        return TestClient(Starlette(routes=GROUP.routes(RunnerApi(two))))

    @pytest.mark.parametrize(
        ("fields", "models", "rotated"),
        [
            ({"scope": "all", "tenantId": None}, ["stuck", "fine"], []),
            ({"scope": "model", "modelId": "fine"}, ["fine"], []),
            ({"scope": "tenant", "tenantId": " x ", "modelId": None}, ["stuck", "fine"], [("tenant", "x")]),
            ({"scope": "tag", "tag": "g", "modelId": "fine"}, ["fine"], [("tag", "g")]),
        ],
    )
    def test_scopes(self, client, fields, models, rotated):
        found = client.post("/v1/cache/flush", json=fields).json()
        assert ([each["modelId"] for each in found["models"]], self.rotated) == (models, rotated)

    @cases(
        ("fields", "param"),
        [
            ({}, "scope"),
            ({"scope": "none"}, "scope"),
            ({"scope": "model"}, "modelId"),
            ({"scope": "tenant", "tenantId": " "}, "tenantId"),
            ({"scope": "tag", "tag": None}, "tag"),
            ({"scope": "tag", "tag": "a\nb"}, "tag"),
            ({"scope": "all", "modelId": "fine"}, "modelId"),
            ({"scope": "model", "modelId": "fine", "tag": "a"}, "tag"),
            ({"scope": "tag", "tag": "a", "tenantId": "a"}, "tenantId"),
        ],
    )
    def test_refused(self, client, fields, param):
        """Also what would limit it more than its scope does."""
        with pytest.raises(InvalidRequestError) as raised:
            client.post("/v1/cache/flush", json=fields)
        assert (raised.value.param, self.rotated) == (param, [])

    def test_what_has_no_effect_is_named(self, client):
        """A token, too, where nobody asks for one."""
        fields = {"scope": "model", "modelId": "fine", "verifiedOpToken": "e30", "more": 1}
        assert client.post("/v1/cache/flush", json=fields).headers["x-llmux-ignored"] == "more, verifiedOpToken"

    def test_one_that_fails_leaves_the_others_flushed(self, client):
        told = client.post("/v1/cache/flush", json={"scope": "all"})
        stuck = {"modelId": "stuck", "flushed": False, "done": "failed", "entriesRemoved": None}
        assert (told.status_code, told.json()) == (
            200,
            {
                "flushed": False,
                "entriesRemoved": None,
                "memoryFreedMB": None,
                "models": [
                    {**stuck, "error": "Its worker can't be killed."},
                    {"modelId": "fine", "flushed": True, "done": "slots_erased", "entriesRemoved": 5},
                ],
            },
        )

    def test_a_single_one_that_fails_is_an_error(self, client):
        with pytest.raises(UnavailableError):
            client.post("/v1/cache/flush", json={"scope": "model", "modelId": "stuck"})

    @pytest.mark.parametrize(
        ("state", "how", "loaded"),
        [(WorkerState.READY, "worker_restarted", ["m"]), (WorkerState.DRAINING, "nothing_to_flush", [])],
    )
    async def test_one_that_was_about_to_go_stays_away(self, monkeypatch, state, how, loaded):
        async def unload(*_: object, **__: object) -> int:
            return 5

        asked = []
        monkeypatch.setattr(flush, "unload", unload)
        monkeypatch.setattr(flush.loading, "ask_load", lambda _daemon, name: asked.append(name))
        adapter = SimpleNamespace(prompt_cache=lambda _config: PromptCache(is_kept=True))
        status = SimpleNamespace(state=state, has_worker=True, spec=SimpleNamespace(remote=False))
        served = SimpleNamespace(
            engine=SimpleNamespace(model=lambda _: status),
            fleet=SimpleNamespace(effective=lambda _: SimpleNamespace(adapter=adapter, config=None)),
        )
        done = await flush._flush_model(served, "m", FlushAll())
        assert (done.how, done.is_flushed, asked) == (how, True, loaded)


class TestFreed:
    """What an unload freed is what the workers took; others may take it at once, or give back more."""

    @cases(
        ("measured", "after_mib", "freed"),
        [
            ([60], 110, 60),
            ([60, 40], 90, 100),
            ([], 110, 0),
            ([None], 110, 10),
            ([60, None], 110, 10),
            ([None], 90, None),
        ],
    )
    async def test_freed(self, measured, after_mib, freed):
        free = [100]
        leases = tuple(
            Lease(("m", index), "gpu0", Phase.IN_USE, 70, measured_mib=mib) for index, mib in enumerate(measured)
        )

        class Engine:
            async def sample(self):
                """All is known."""

            async def unload(self, *_order):
                free[0] = after_mib

            def model(self, _model):
                return SimpleNamespace(has_worker=True, devices=("gpu0",), leases=leases)

            def devices(self):
                return [SimpleNamespace(id="gpu0", totals=SimpleNamespace(free_mib=free[0]))]

        assert await unload(SimpleNamespace(engine=Engine()), "m", UnloadRequested("m")) == freed


class TestBeforeItServes:
    """Until memory was read, nothing is told of it; the process itself is alive."""

    async def test_starting(self, tmp_path):
        async with serving(tmp_path) as served:
            devices = tuple(device.spec for device in served.daemon.sampler.devices())
            served.daemon.engine.post(Configured(served.daemon.catalog.model_specs(), devices))
            status, headers, body = await ask(served.port, get(b"/v1/capabilities"))
            assert (status, headers["retry-after"]) == (503, "5")
            assert msgspec.json.decode(body)["error"]["message"] == "The runner is starting."
            status, _, body = await ask(served.port, get(b"/livez"))
            assert (status, body) == (200, b'{"status":"ok"}')
            await served.daemon.engine.sample()
            status, _, _ = await ask(served.port, get(b"/v1/capabilities"))
            assert status == 200


class TestAsItEnds:
    async def test_nothing_is_loaded(self, tmp_path):
        """Also not what still answers: it goes with the daemon."""
        async with serving(tmp_path) as served:
            served.daemon.engine.post(Configured(served.daemon.catalog.model_specs(), ()))
            served.daemon.engine.post(ShutdownRequested())
            body = b'{"modelId": "plain"}'
            head = get(b"/v1/models/load", b"Content-Length: %d" % len(body), method=b"POST")
            status, _, told = await ask(served.port, head + body)
            assert (status, msgspec.json.decode(told)["error"]["code"]) == (503, "shutting_down")
