"""deploy/podman, followed as its page says: the image is built, the pod made and asked, stopped and upgraded.

`make test-podman` runs these; elsewhere they are skipped. There is no GPU in it, and no systemd: `podman pod start` does what
the units do.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import yaml

from tests.support import tiny
from tests.support.daemon import FAKE_WORKER, REPOSITORY, wait_until
from tests.support.podman import IMAGE, Podman
from tests.support.ports import quiet_ports

SCRIPTS = REPOSITORY / "deploy" / "podman"
HELLO = [{"role": "user", "content": "Hello"}]


class Pod:
    """The pod of a person who has followed the page; `key` is theirs."""

    def __init__(self, podman: Podman) -> None:
        self.podman = podman
        self.folder = podman.folder / ".local" / "share" / "llmux_pod"
        self.address = f"127.0.0.1:{quiet_ports()}"
        self.scripts = podman.folder / "source" / "deploy" / "podman"
        self.folder.mkdir(parents=True)
        (self.folder / "config").mkdir()
        (self.folder / "models").mkdir()
        shutil.copy(tiny.model(name="tiny-chat"), self.folder / "models" / "tiny.gguf")
        shutil.copy(FAKE_WORKER, self.folder / "models" / "worker.py")
        worker = ["python3", "/models/worker.py", "--host", "${host}", "--port", "${port}"]
        models = {
            "tiny": {"path": "/models/tiny.gguf", "threads": 1},
            "slow": {"cmd": [*worker, "--goes-on-until", "/models/enough"], "vram_mib": 100},
            "forks": {"cmd": [*worker, "--daemonize", "3"], "vram_mib": 100},
        }
        config = {"models": models, "devices": [{"kind": "host", "budget_mib": 4000}]}
        (self.folder / "config" / "llmux.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        podman.owned()
        self.key = self.run_once("keys", "add", "me").split()[0]
        headers = {"Authorization": f"Bearer {self.key}"}
        self.client = httpx.Client(base_url=f"http://{self.address}", headers=headers, trust_env=False, timeout=120)

    def run_once(self, *words: str) -> str:
        return self.podman.done(self.scripts / "run_once", *words)

    def make(self) -> str:
        told = self.podman.done(
            self.scripts / "create_pod", "--gpu", "none", "--no-systemd", LLMUX_POD_LISTEN=self.address
        )
        self.start()
        return told

    def start(self) -> None:
        self.podman.done("podman", "pod", "start", "llmux_pod")
        wait_until(lambda: self.status("/health") == 200, what="it answers")

    def status(self, path: str) -> int:
        try:
            return self.client.get(path).status_code
        except httpx.TransportError:
            return 0

    def chat(self, model: str) -> str:
        answer = self.client.post("/v1/chat/completions", json={"model": model, "messages": HELLO})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    def stream(self, model: str) -> list[str]:
        """The lines of a streamed answer."""
        body = {"model": model, "messages": HELLO, "stream": True}
        with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            return [line for line in answer.iter_lines() if line.startswith("data:")]

    def inside(self, *words: str) -> str:
        return self.podman.done("podman", "exec", "llmux_ctr", *words)

    def processes(self) -> list[str]:
        """What runs in the container, without what asks for it."""
        code = "import glob; print(*(open(f).read().replace('\\0', ' ') for f in glob.glob('/proc/[0-9]*/cmdline')), sep='\\n')"
        return [line for line in self.inside("python3", "-c", code).splitlines() if line and "glob.glob" not in line]


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    if os.environ.get("LLMUX_TEST_PODMAN") != "1":
        pytest.skip("builds an image (make test-podman does, in some minutes)")
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed here")
    one = Podman()
    try:
        one.build()
        yield one
    finally:
        one.close()


@pytest.fixture(scope="module")
def pod(podman: Podman) -> Iterator[Pod]:
    one = Pod(podman)
    one.run_once("runtimes", "install", "llama_server")
    one.make()
    yield one
    one.client.close()


class TestImage:
    """Slim, and nobody's in particular."""

    def test_runs_without_root(self, podman):
        assert podman.done("podman", "run", "--rm", "--entrypoint", "id", IMAGE, "-u").strip() == "1000"

    def test_has_no_cuda_and_no_models(self, podman):
        code = "import pathlib; print([f for f in pathlib.Path('/').rglob('*') if f.name.startswith(('libcu', 'torch')) or f.suffix in ('.gguf', '.safetensors')])"
        assert podman.done("podman", "run", "--rm", "--entrypoint", "python3", IMAGE, "-c", code).strip() == "[]"

    def test_is_small(self, podman):
        size = int(podman.done("podman", "image", "inspect", IMAGE, "--format", "{{.Size}}"))
        assert size < 350_000_000

    def test_without_a_configuration(self, podman):
        told = podman("podman", "run", "--rm", IMAGE)
        assert told.returncode == 2
        assert "/config/llmux.yaml: there is no such file" in told.stderr


class TestPod:
    """What clients and operators find."""

    def test_a_key_is_needed(self, pod):
        assert httpx.get(f"http://{pod.address}/v1/models", trust_env=False).status_code == 401
        assert httpx.get(f"http://{pod.address}/health", trust_env=False).status_code == 200
        assert [model["id"] for model in pod.client.get("/v1/models").json()["data"]] == ["tiny", "slow", "forks"]

    def test_a_real_worker_answers(self, pod):
        assert pod.chat("tiny") == tiny.ANSWER

    def test_streams(self, pod):
        lines = pod.stream("tiny")
        assert len(lines) > 3
        assert lines[-1] == "data: [DONE]"

    def test_commands_in_it_need_no_key(self, pod):
        assert "tiny" in pod.inside("llmux", "ps")
        assert "no mistakes" in pod.inside("llmux", "config", "check").lower()

    @pytest.mark.parametrize("path", ["/new", "/opt/llmux/new", "/config/new", "/models/new"])
    def test_it_can_write_nothing_but_its_volumes(self, pod, path):
        assert pod.podman("podman", "exec", "llmux_ctr", "touch", path).returncode != 0

    def test_it_is_healthy(self, pod):
        pod.podman.done("podman", "healthcheck", "run", "llmux_ctr")

    def test_it_cannot_become_more(self, pod):
        status = dict(
            line.split(":\t", 1) for line in pod.inside("cat", "/proc/self/status").splitlines() if ":\t" in line
        )
        assert (int(status["CapEff"], 16), status["NoNewPrivs"]) == (0, "1")

    def test_a_killed_worker_is_replaced(self, pod):
        pod.chat("tiny")
        worker = pod.client.get("/v1/admin/models/tiny").json()["worker"]["pid"]
        pod.inside("python3", "-c", f"import os; os.kill({worker}, {signal.SIGKILL.value})")
        wait_until(lambda: pod.client.get("/v1/admin/models/tiny").json()["state"] != "ready", what="it is noticed")
        assert pod.chat("tiny") == tiny.ANSWER
        assert pod.client.get("/v1/admin/models/tiny").json()["worker"]["pid"] != worker

    def test_what_detaches_itself_ends_with_its_worker(self, pod):
        pod.chat("forks")
        assert any("worker.py" in line for line in pod.processes())
        assert pod.client.post("/v1/admin/models/forks/unload").status_code == 200
        wait_until(lambda: not any("worker.py" in line for line in pod.processes()), what="they have ended")

    def test_the_configuration_is_read_again(self, pod):
        path = pod.folder / "config" / "llmux.yaml"
        before = path.read_text()
        path.write_text(before + "virtual_models: {Second: {model: tiny}}\n")
        try:
            assert "Second" in pod.inside("llmux", "reload")
            assert pod.chat("Second") == tiny.ANSWER
        finally:
            path.write_text(before)
            pod.inside("llmux", "reload")


class TestEnd:
    """Stopping and upgrading; in the order of the file, since each leaves the pod running."""

    def test_a_stop_waits_for_running_requests(self, pod):
        with ThreadPoolExecutor(2) as pool:
            answer = pool.submit(pod.stream, "slow")
            wait_until(lambda: pod.client.get("/v1/admin/models/slow").json()["in_flight"] == 1, what="it runs")
            stopped = pool.submit(pod.podman.done, "podman", "stop", "llmux_ctr")
            wait_until(lambda: pod.status("/health") != 200, what="the stop has begun")
            assert not answer.done()
            (pod.folder / "models" / "enough").touch()
            assert answer.result()[-1] == "data: [DONE]"
            stopped.result()
        state = pod.podman.done("podman", "inspect", "llmux_ctr", "--format", "{{.State.Status}} {{.State.ExitCode}}")
        assert state.strip() == "exited 0"
        pod.start()

    def test_a_killed_daemon_leaves_nothing(self, pod):
        pod.chat("forks")
        pod.podman.done("podman", "kill", "--signal", "KILL", "llmux_ctr")
        state = ["podman", "inspect", "llmux_ctr", "--format", "{{.State.Status}}"]
        wait_until(lambda: pod.podman.done(*state).strip() == "exited", what="it has ended")
        assert not re.search(r"worker\.py|llama", pod.podman.done("podman", "ps", "--format", "{{.Command}}"))
        pod.start()
        assert pod.chat("tiny") == tiny.ANSWER

    def test_made_anew_it_remembers(self, pod):
        pod.chat("tiny")
        pod.make()
        assert "learned" in pod.inside("llmux", "ps", "--json") or pod.chat("tiny") == tiny.ANSWER
        assert "llama_server    installed" in pod.run_once("runtimes", "list")


class TestRefusals:
    """What is missing is told, with what to do."""

    def test_no_keys(self, podman, tmp_path):
        folder = podman.folder / "unfinished"
        (folder / "config").mkdir(parents=True)
        (folder / "config" / "llmux.yaml").write_text("models: {}\n")
        podman.owned()
        script = podman.folder / "source" / "deploy" / "podman" / "create_pod"
        told = podman(script, "--gpu", "none", "--no-systemd", LLMUX_POD_DIR=str(folder))
        assert told.returncode == 1
        assert "api_keys.yaml; a published port needs keys" in told.stderr

    def test_no_gpu(self, pod):
        if any(os.path.isdir(path) and os.listdir(path) for path in ("/etc/cdi", "/var/run/cdi")):
            pytest.skip("this machine has devices for containers")
        told = pod.podman(pod.scripts / "create_pod", "--no-systemd", LLMUX_POD_LISTEN=pod.address)
        assert told.returncode == 1
        assert "nvidia-ctk cdi generate" in told.stderr
        assert pod.status("/health") == 200

    def test_an_unknown_argument(self, podman):
        told = podman(podman.folder / "source" / "deploy" / "podman" / "create_pod", "--gpus")
        assert told.returncode == 1
        assert "--gpu all|none|NUMBER" in told.stderr
