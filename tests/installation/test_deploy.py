"""The files in deploy/: each is read by the program it is written for, where that is at hand, and they agree with llmux and
with each other. test_podman.py runs the image and the pod, test_traefik.py Traefik.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from supervisor.catalog import load
from supervisor.catalog.keys import Scope, load_keys
from supervisor.catalog.sections.sections import ServerConfig
from tests.support.daemon import REPOSITORY
from tests.support.limits import LIMIT_S

DEPLOY = REPOSITORY / "deploy"
VERSION = "1.32"  # of Kubernetes
PODMAN, COMPOSE, TRAEFIK, KUBERNETES = (DEPLOY / name for name in ("podman", "compose", "traefik", "kubernetes"))
SCRIPTS = [PODMAN / "create_pod", PODMAN / "run_once", COMPOSE / "make_keys"]
GENERATORS = [Path("/usr/lib/systemd/user-generators/podman-user-generator"), Path("/usr/libexec/podman/quadlet")]


def run(*words: str | Path, **keys: Any) -> str:
    """What a program that must succeed prints."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, **keys)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def need(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed here")
    return found


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


class TestAll:
    """What holds for every file."""

    @pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
    def test_scripts(self, script):
        assert os.access(script, os.X_OK)
        run("sh", "-n", script)
        if shutil.which("shellcheck"):
            run("shellcheck", script)

    def test_variables_are_settings(self):
        """`LLMUX_SERVER__…` of another name would stop the daemon."""
        named = set()
        for path in filter(Path.is_file, DEPLOY.rglob("*")):
            named |= set(re.findall(rb"LLMUX_SERVER__(\w+)", path.read_bytes()))
        assert named
        assert {name.decode().lower() for name in named} <= set(ServerConfig.model_fields)

    @pytest.mark.parametrize("gpu", ["nvidia.com/gpu", "amd.com/gpu", None], ids=["NVIDIA", "AMD", "none"])
    def test_run_once_has_the_gpus_that_podman_knows(self, tmp_path, gpu):
        """Compilers and sizes need them; another vendor's would stop podman."""
        script = tmp_path / "run_once"
        script.write_text((PODMAN / "run_once").read_text().replace("/etc/cdi", f"{tmp_path}/cdi"))
        podman = tmp_path / "podman"
        podman.write_text('#!/bin/sh\necho "$@"\n')
        podman.chmod(0o755)
        if gpu is not None:
            (tmp_path / "cdi").mkdir()
            (tmp_path / "cdi" / "gpu.yaml").write_text(f"cdiVersion: 0.6.0\nkind: {gpu}\n")
        env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
        compilers = {"CMAKE_ARGS": "-DA=1", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
        told = run("sh", script, "keys", "list", env=env | compilers, stdin=subprocess.DEVNULL).split()
        assert told[-3:] == ["localhost/llmux", "keys", "list"]
        assert "--env CMAKE_ARGS" in " ".join(told)
        assert "--env CMAKE_BUILD_PARALLEL_LEVEL" in " ".join(told)
        assert ("nvidia.com/gpu=all" in told) == (gpu == "nvidia.com/gpu")
        told = run("sh", script, "keys", "list", env=env | {"LLMUX_POD_GPU": "none"}, stdin=subprocess.DEVNULL).split()
        assert "nvidia.com/gpu=all" not in told

    def test_every_stop_is_longer_than_a_drain(self):
        """30 s for running requests, and then the workers end."""
        pod, unit = (PODMAN / "create_pod").read_text(), (PODMAN / "quadlet" / "llmux.container").read_text()
        service = read(COMPOSE / "compose.yaml")["services"]["llmux"]
        spec = read(KUBERNETES / "base" / "statefulset.yaml")["spec"]["template"]["spec"]
        assert "--stop-timeout 60" in pod
        assert "StopTimeout=60" in unit
        assert service["stop_grace_period"] == "60s"
        assert spec["terminationGracePeriodSeconds"] >= 60


class TestImage:
    """The Containerfile."""

    def test_what_it_copies_is_there(self):
        """And is not kept out of the build by .dockerignore."""
        let_in = [line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")]
        lines = re.findall(r"^COPY (?!--from)(.+) \S+$", (PODMAN / "Containerfile").read_text(), re.MULTILINE)
        for name in " ".join(lines).split():
            assert (REPOSITORY / name).exists(), name
            assert any(Path(name).is_relative_to(path) for path in let_in), name

    def test_secrets_are_kept_out(self):
        kept_out = (REPOSITORY / ".dockerignore").read_text().splitlines()
        assert kept_out[0] == "*"
        assert {"config/api_keys.yaml", "config/local.yaml"} <= set(kept_out)

    def test_it_is_nobody_elses_and_no_root(self):
        text = (PODMAN / "Containerfile").read_text()
        final = text.rpartition("\nFROM ")[2]
        assert "\nUSER 1000:1000\n" in final
        assert "cuda" not in "\n".join(line for line in text.lower().splitlines() if not line.startswith("#"))


class TestQuadlet:
    """The units for podman 5."""

    @staticmethod
    def unit(name: str) -> configparser.RawConfigParser:
        class Repeated(dict):  # type: ignore[type-arg]
            """A key that is given again has one line more."""

            def __setitem__(self, key: str, value: Any) -> None:
                super().__setitem__(key, [*self[key], *value] if key in self and isinstance(value, list) else value)

        parser = configparser.RawConfigParser(strict=False, dict_type=Repeated)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read(PODMAN / "quadlet" / name)
        return parser

    def test_they_are_what_create_pod_makes(self):
        script = (PODMAN / "create_pod").read_text()
        container, pod = self.unit("llmux.container"), self.unit("llmux.pod")
        mounts = dict(re.findall(r'--volume "?([^" ]+?):(/\w+(?::ro)?)"?', script))
        written = dict(line.split(":", 1) for line in container["Container"]["Volume"].splitlines())
        volumes = {
            f"{self.unit(f'llmux-{kind}.volume')['Volume']['VolumeName']}": kind for kind in ("runtimes", "state")
        }
        assert {volumes.get(host, host.rpartition("/")[2]): inside for host, inside in mounts.items()} == {
            re.sub(r"^llmux-|\.volume$", "", host.rpartition("/")[2]): inside for host, inside in written.items()
        }
        assert container["Container"]["ContainerName"] == "llmux_ctr"
        assert pod["Pod"]["PodName"] == "llmux_pod"
        assert pod["Pod"]["PublishPort"].startswith("127.0.0.1:")
        assert pod["Pod"]["PodmanArgs"].removeprefix("--userns=") in script
        assert container["Container"]["HealthCmd"] == "alive"
        assert "--health-cmd alive" in script

    def test_podman_reads_them(self, tmp_path):
        generator = next(filter(Path.exists, GENERATORS), None)
        if generator is None:
            pytest.skip("needs podman 5's generator of units")
        for path in (PODMAN / "quadlet").iterdir():
            shutil.copy(path, tmp_path)
        told = run(generator, "-user", "-dryrun", env={**os.environ, "QUADLET_UNIT_DIRS": str(tmp_path)})
        assert "--read-only" in told
        assert "--pod-id-file" in told


class TestCompose:
    """llmux and Open WebUI."""

    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        """A copy in which the keys are made."""
        copied = shutil.copytree(COMPOSE, tmp_path / "compose", ignore=shutil.ignore_patterns("secrets"))
        run(copied / "make_keys")
        return copied

    def test_keys(self, folder):
        keyring = load_keys(folder / "secrets" / "api_keys.yaml")
        assert [key.name for key in keyring.keys] == ["me", "Open WebUI"]
        assert {key.scopes for key in keyring.keys} == {frozenset({Scope.INFERENCE, Scope.ADMIN})}
        kept = (folder / "secrets" / "open_webui_key").read_text()
        assert kept in (folder / "secrets" / "api_keys.yaml").read_text()
        run(folder / "make_keys")
        assert (folder / "secrets" / "open_webui_key").read_text() == kept
        assert {path.stat().st_mode & 0o777 for path in (folder / "secrets").iterdir()} == {0o600}

    def test_the_names_are_models_of_that_type(self):
        catalog = load(COMPOSE / "config" / "llmux.yaml", check_files=False)
        variables = read(COMPOSE / "compose.yaml")["services"]["open-webui"]["environment"]
        wanted = {"AUDIO_STT_MODEL": "asr", "AUDIO_TTS_MODEL": "tts", "RAG_EMBEDDING_MODEL": "embedding"}
        for variable, kind in wanted.items():
            name = re.fullmatch(r"\$\{\w+:-(\w+)\}", variables[variable])[1]
            assert catalog.models[name].config.type == kind
        assert all(model.config.source is not None for model in catalog.models.values())

    def test_open_webui_gets_its_key_from_the_file(self, tmp_path):
        """In each of its variables, and none stands in the configuration."""
        service = read(COMPOSE / "compose.yaml")["services"]["open-webui"]
        assert not [name for name in service["environment"] if "KEY" in name]
        secret = tmp_path / "key"
        secret.write_text("sk-llmux-openwebui-1")
        (tmp_path / "start.sh").write_text("env | grep API_KEY= | sort\n")
        *shell, script = service["command"]
        script = script.replace("$$", "$").replace("/run/secrets/open_webui_key", str(secret))
        kept = {name: value for name, value in os.environ.items() if "API_KEY" not in name}
        assert run(*shell, script, cwd=tmp_path, env=kept).splitlines() == [
            f"{name}OPENAI_API_KEY=sk-llmux-openwebui-1" for name in ("AUDIO_STT_", "AUDIO_TTS_", "", "RAG_")
        ]

    def test_its_connection_has_buttons_and_news(self):
        variables = read(COMPOSE / "compose.yaml")["services"]["open-webui"]["environment"]
        connection = json.loads(variables["OPENAI_API_CONFIGS"])["0"]
        assert connection["provider"] == "llama.cpp"
        assert connection["headers"] == {"X-Llmux-Load-Feedback": "true"}

    @pytest.mark.parametrize("gpu", [False, True], ids=["processor", "gpu"])
    def test_compose_reads_it(self, folder, gpu):
        """podman-compose, and Docker Compose where it is. Neither starts anything."""
        files = ["compose.yaml", *(["compose.gpu.yaml"] if gpu else [])]
        flags = [word for name in files for word in ("-f", name)]
        programs = [[sys.executable, "-m", "podman_compose", "--dry-run"]]  # it would look for podman
        docker = shutil.which("docker")
        if docker and not subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
            programs.append([docker, "compose"])
        for program in programs:
            self.agrees(run(*program, *flags, "config", cwd=folder), gpu)

    def agrees(self, told: str, gpu: bool) -> None:
        services = yaml.safe_load(told)["services"]
        assert set(services) == {"llmux", "open-webui"}
        assert services["open-webui"]["depends_on"]["llmux"]["condition"] == "service_healthy"
        assert ("deploy" in services["llmux"]) == gpu


class TestTraefik:
    """The router."""

    @staticmethod
    def rendered(**variables: str) -> Any:
        """As Traefik fills it in: `env`, and `or` with a default."""

        def value(found: re.Match[str]) -> str:
            given = variables.get(found[1], "")
            return given or found[2] or ""

        text = (TRAEFIK / "llmux.yml").read_text()
        text = re.sub(r'\{\{ (?:or \()?env "(\w+)"\)?(?: "([^"]*)")? \}\}', value, text)
        assert "{{" not in text
        return yaml.safe_load(text)["http"]

    def test_the_originals_host_entry_point_and_backend(self):
        """A VPN's entry point, and a Traefik in a pod of its own."""
        http = self.rendered(
            LLMUX_HOST="llm.example.org", LLMUX_ENTRYPOINT="wghttp", LLMUX_BACKEND="http://10.0.2.2:8081"
        )
        router = http["routers"]["llmux"]
        assert router["rule"].startswith("Host(`llm.example.org`) && ")
        assert (router["entryPoints"], router["priority"], router["service"]) == (["wghttp"], 100, "llmux")
        assert http["services"]["llmux"]["loadBalancer"]["servers"] == [{"url": "http://10.0.2.2:8081"}]

    def test_defaults(self):
        http = self.rendered(LLMUX_HOST="llm.example.org")
        assert http["routers"]["llmux"]["entryPoints"] == ["websecure"]
        assert http["services"]["llmux"]["loadBalancer"]["servers"] == [{"url": "http://127.0.0.1:8081"}]

    def test_administration_is_not_routed(self):
        assert "!PathPrefix(`/v1/admin`)" in self.rendered(LLMUX_HOST="x")["routers"]["llmux"]["rule"]


class TestKubernetes:
    """One Pod."""

    @pytest.fixture
    def base(self) -> dict[str, Any]:
        return {one["kind"]: one for path in (KUBERNETES / "base").glob("*.yaml") if (one := read(path))}

    def test_it_has_no_more_rights_than_it_needs(self, base):
        """What the Pod Security Standard `restricted` asks for, and a root file system that is read-only."""
        spec = base["StatefulSet"]["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec["initContainers"], *spec["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }

    def test_what_it_writes_is_mounted(self, base):
        spec = base["StatefulSet"]["spec"]
        claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
        volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]} | claims
        (container,) = spec["template"]["spec"]["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) == volumes
        assert {mounts[path] for path in ("/models", "/runtimes", "/state")} == claims

    def test_runtimes_are_installed_for_what_they_compute_on(self, base, tmp_path):
        """The init container has the GPU by which llmux can tell, and one says which stay on the processor."""
        (prepare,) = base["StatefulSet"]["spec"]["template"]["spec"]["initContainers"]
        variables = {one["name"]: one["value"] for one in prepare["env"]}
        (tmp_path / "llmux").write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / "llmux").chmod(0o755)
        path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        told = run(*prepare["command"], env=variables | path).splitlines()
        assert told == ["runtimes install llama_server", "pull"]
        told = run(*prepare["command"], env=variables | path | {"CPU_RUNTIMES": "transformers vllm"}).splitlines()
        assert told[1:3] == [f"runtimes install {name} --accelerator cpu" for name in ("transformers", "vllm")]

    def test_ports_and_probes_meet(self, base):
        (container,) = base["StatefulSet"]["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert {port["targetPort"] for port in base["Service"]["spec"]["ports"]} == set(ports)
        probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert {get["port"] for get in probes.values()} == {"http"}
        assert [get["path"] for get in probes.values()] == ["/livez", "/livez", "/health"]
        monitor = read(KUBERNETES / "monitoring" / "servicemonitor.yaml")["spec"]
        assert monitor["endpoints"][0]["port"] in ports
        assert monitor["selector"]["matchLabels"].items() <= base["Service"]["metadata"]["labels"].items()

    def test_its_configuration(self):
        catalog = load(KUBERNETES / "base" / "config" / "llmux.yaml", check_files=False)
        assert all(model.config.source is not None for model in catalog.models.values())

    @pytest.mark.parametrize("name", ["StatefulSet", "Service", "Namespace"])
    def test_its_schema(self, base, name):
        """Kubernetes refuses fields that it doesn't know."""
        kubernetes_validate.validate(base[name], VERSION, strict=True)

    @pytest.mark.parametrize("name", ["base", "cpu", "monitoring"])
    def test_kubectl_reads_it(self, tmp_path, name):
        kubectl = need("kubectl")
        copied = shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
        (copied / "base" / "config" / "api_keys.yaml").write_text("[]\n")
        objects = list(yaml.safe_load_all(run(kubectl, "kustomize", copied / name)))
        assert {one["metadata"].get("namespace", "llmux") for one in objects} == {"llmux"}
        if name == "monitoring":
            return
        (pod,) = (one["spec"]["template"]["spec"] for one in objects if one["kind"] == "StatefulSet")
        for container in (*pod["initContainers"], *pod["containers"]):
            assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (name == "base")
        for one in objects:
            kubernetes_validate.validate(one, VERSION, strict=True)
