"""The command adapter: words, placeholders, endpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from runtimes import device_kind
from runtimes.base import Endpoint, LaunchContext, ModelUnusableError
from runtimes.command.adapter import DEFAULT_ENDPOINTS, CommandAdapter
from runtimes.device_kind import DeviceAssignment
from tests.support.cases import cases

ADAPTER = CommandAdapter()


def config(**keys):
    return ADAPTER.config(runtime="command", **{"cmd": [sys.executable, "${port}"], **keys})


def launch(**keys):
    host = DeviceAssignment("host", device_kind.HOST)
    context = LaunchContext("a model; rm -rf", "127.0.0.1", 18100, "secret", (host,), Path("/nonexistent"))
    return ADAPTER.launch(config(**keys), context)


class TestCommand:
    """The command is words, never a shell's line."""

    def test_placeholders_are_filled_inside_words(self):
        cmd = [sys.executable, "--listen=${host}:${port}", "--name", "${model}"]
        assert launch(cmd=cmd).argv[1:] == ("--listen=127.0.0.1:18100", "--name", "a model; rm -rf")

    def test_a_string_is_split_before_it_is_filled(self):
        argv = launch(cmd=f"{sys.executable} -c 'print(1)' ${{model}} | cat").argv
        assert argv[1:] == ("-c", "print(1)", "a model; rm -rf", "|", "cat")

    def test_a_string_is_read_as_a_shell_reads_it(self):
        cmd = f"""
            # {{it isn't}} ours
            {sys.executable}  # serve --port 80
            --port ${{port}} \\
            http://a/b#c '# this
            stays' \\# "\\" # too"
        """
        assert launch(cmd=cmd).argv[1:] == (
            "--port",
            "18100",
            "http://a/b#c",
            "# this\n            stays",
            "#",
            '" # too',
        )

    def test_doubled_dollars_stand_for_themselves(self):
        assert launch(cmd=[sys.executable, "$${port}", "$HOME", "${port}$"]).argv[1:] == ("${port}", "$HOME", "18100$")

    @cases(
        ("cmd", "complaint"),
        [
            (["a", "${prot}"], r"\$\{prot\}: not a placeholder; there are \$\{port\}, \$\{host\}, \$\{model\}"),
            ("a '${port}", "No closing quotation"),
            (["a", "${port"], "without its }"),
            ("a –port ${port}", r"–port: begins with a dash \(–\) that no program takes for an option: type -"),
            (["a", "—port", "${port}"], "begins with a dash"),
            ("a “b c” ${port}", "“b: begins with a curly quote"),
            ([], "empty"),
            ("", "empty"),
        ],
    )
    def test_what_cant_be_run_is_refused(self, cmd, complaint):
        with pytest.raises(ValidationError, match=complaint):
            config(cmd=cmd)

    def test_its_parts_of_the_devices(self):
        cards = tuple(DeviceAssignment(f"gpu{i}", device_kind.CUDA, i) for i in range(2))
        context = LaunchContext("m", "127.0.0.1", 1, "secret", cards, Path("/nonexistent"), (5576, 8760))
        cmd = [sys.executable, "--port=${port}", "--tensor-split", "${parts}"]
        assert ADAPTER.launch(config(cmd=cmd, gpus="auto"), context).argv[1:] == (
            "--port=1",
            "--tensor-split",
            "5576,8760",
        )

    def test_placeholders_work_in_the_environment(self):
        env = launch(env={"PORT": "${port}", "PLAIN": "x"}).env
        assert (env["PORT"], env["PLAIN"]) == ("18100", "x")
        with pytest.raises(ValidationError, match="not a placeholder"):
            config(env={"PORT": "${prot}"})

    def test_stop_cmd_is_a_command_too(self):
        spec = launch(stop_cmd=[sys.executable, "stop", "${port}"])
        assert spec.stop_argv == (sys.executable, "stop", "18100")

    def test_a_program_is_looked_up_on_path(self, tmp_path):
        assert Path(launch(cmd="sh -c true").argv[0]).is_absolute()
        (tmp_path / "mine").write_text("#!/bin/sh\n")
        (tmp_path / "mine").chmod(0o755)
        assert launch(cmd="mine", env={"PATH": str(tmp_path)}).argv == (str(tmp_path / "mine"),)
        assert launch(cmd="./mine", cwd=str(tmp_path)).argv == (str(tmp_path / "mine"),)

    def test_a_program_that_isnt_there_is_said(self):
        problems = ADAPTER.check(
            config(cmd="no-such-program ${port}", cwd="/no/such"), runtimes_dir=Path("/nonexistent")
        )
        assert problems == ("cmd: no-such-program is not a program on PATH", "cwd: /no/such: there is no such folder")
        with pytest.raises(ModelUnusableError, match="no-such-program"):
            launch(cmd="no-such-program")


class TestKey:
    """Only a program that can check the key gets it."""

    def test_bearer(self):
        spec = launch(auth="bearer")
        assert (spec.auth, spec.env["LLMUX_WORKER_KEY"]) == ("Bearer secret", "secret")

    def test_none(self):
        spec = launch()
        assert spec.auth is None
        assert "secret" not in spec.env.values()


class TestPort:
    """The program must learn its port, which llmux chooses."""

    @cases(
        ("keys", "told"),
        [
            ({"cmd": "sh serve.sh"}, "cmd: nothing tells the program its port"),
            ({"cmd": "sh -c '$${port}'"}, "cmd: nothing tells the program its port"),
            (
                {"cmd": ["sh", "--port", "8080"]},
                "cmd: --port 8080 is a fixed port, and llmux chooses the port of each worker",
            ),
            ({"cmd": "sh --http-port=8080 -c 1"}, "write --http-port=${port} instead"),
            ({"cmd": "sh --listen 127.0.0.1:9000"}, "write 127.0.0.1:${port} instead"),
            ({"cmd": "sh --top-p 10"}, "put ${port} into cmd or env, as in --port ${port}"),
        ],
    )
    def test_is_missing(self, keys, told):
        (problem,) = ADAPTER.check(config(**keys), runtimes_dir=Path("/nonexistent"))
        assert told in problem

    @pytest.mark.parametrize(
        "keys",
        [
            {"cmd": "sh -p ${port}:8080"},
            {"cmd": ["sh", "serve.sh"], "env": {"PORT": "${port}"}},
        ],
    )
    def test_is_told(self, keys):
        assert ADAPTER.check(config(**keys), runtimes_dir=Path("/nonexistent")) == ()


class TestContainers:
    """`docker run` and its like: named, published on the worker's address, and removed by name after every end."""

    @pytest.fixture(autouse=True)
    def engines(self, tmp_path, monkeypatch):
        for name in ("docker", "podman"):
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    @pytest.mark.parametrize(
        ("cmd", "runs", "ends"),
        [
            (
                "docker run --rm -p ${port}:8080 --name x image -m m --name y",
                "run --rm -p 127.0.0.1:18100:8080 --name x image -m m --name y",
                "rm --force x",
            ),
            (
                "podman --log-level error run -it --publish=${port}:80 image --name y",
                "--log-level error run --name llmux-a-model--rm--rf-18100 -it --publish=127.0.0.1:18100:80 image --name y",
                "--log-level error rm --force llmux-a-model--rm--rf-18100",
            ),
            (
                "docker run --gpus all -v /m:/m -p 0.0.0.0:${port}:80 --name=z image",
                "run --gpus all -v /m:/m -p 0.0.0.0:18100:80 --name=z image",
                "rm --force z",
            ),
            (
                "docker -D container run -itp ${port}:80 -p${port}:81 --name z image",
                "-D container run -itp 127.0.0.1:18100:80 -p127.0.0.1:18100:81 --name z image",
                "-D container rm --force z",
            ),
        ],
    )
    def test_run(self, cmd, runs, ends):
        spec = launch(cmd=cmd)
        assert " ".join(spec.argv[1:]) == runs
        assert spec.kill_argv is not None
        assert (spec.kill_argv[0], " ".join(spec.kill_argv[1:])) == (spec.argv[0], ends)

    @cases("engine", ["docker", "podman"])
    @cases("spelling", ["-p {}", "-p{}", "-p={}", "-itp {}", "-itp={}", "--publish {}", "--publish={}"])
    @cases(
        ("written", "published"),
        [
            ("${port}:80", "127.0.0.1:18100:80"),
            ("${port}:80/tcp", "127.0.0.1:18100:80/tcp"),
            ("80", "127.0.0.1::80"),
            ("80-90/udp", "127.0.0.1::80-90/udp"),
            (":80", "127.0.0.1::80"),
            ("::80", "127.0.0.1::80"),
            (":${port}:80", "127.0.0.1:18100:80"),
            ("127.0.0.1::80", "127.0.0.1::80"),
            ("10.1.2.3:${port}:80", "10.1.2.3:18100:80"),
            ("0.0.0.0:${port}:80", "0.0.0.0:18100:80"),
            ("[::]:${port}:80", "[::]:18100:80"),
            ("[::1]:${port}:80", "[::1]:18100:80"),
        ],
    )
    def test_published(self, engine, spelling, written, published):
        """On the worker's address, unless another was written."""
        spec = launch(cmd=f"{engine} run --name x {spelling.format(written)} --rm image -p 80 -p ${{port}}:80")
        assert " ".join(spec.argv[1:]) == f"run --name x {spelling.format(published)} --rm image -p 80 -p 18100:80"

    def test_what_is_written_counts(self):
        spec = launch(cmd="docker run -p ${port}:80 image", kill_cmd="sh clean-up ${port}")
        assert spec.kill_argv is not None
        assert spec.kill_argv[1:] == ("clean-up", "18100")

    @pytest.mark.parametrize(
        "cmd",
        [
            "docker start -a x ${port}",
            "docker compose run -p ${port}:80 x",
            "docker exec x run ${port}",
            "sh -c 'docker run -p ${port}:80 image'",
        ],
    )
    def test_others_are_run_as_they_are(self, cmd):
        assert launch(cmd=cmd).kill_argv is None

    @cases(
        "switch",
        [
            *("-d", "--detach", "-itd", "-dp 8:8", "--detach=true", "-d=1"),
            *("-P", "-Pi", "-itP", "-P=true", "--publish-all", "--publish-all=true", "-P --name x", "-Pp 8:8"),
        ],
    )
    def test_refused(self, switch):
        problems = ADAPTER.check(
            config(cmd=f"docker run {switch} -p ${{port}}:80 image"), runtimes_dir=Path("/nonexistent")
        )
        everything = "cmd: -P publishes every port of the image to the whole network"
        detached = "cmd: a container that is detached looks as if it had ended: remove -d"
        assert [problem[: len(everything)] for problem in problems] == [
            everything if "P" in switch or "publish" in switch else detached[: len(everything)]
        ]

    @pytest.mark.parametrize(
        "options", ["-p 8080:80 -e PORT=${port}", "-p 80:${port}", "--publish 127.0.0.1:8080:80 --name=${port}"]
    )
    def test_nothing_is_published_where_llmux_asks(self, options):
        problems = ADAPTER.check(config(cmd=f"docker run {options} image"), runtimes_dir=Path("/nonexistent"))
        assert len(problems) == 1
        assert problems[0].startswith("cmd: no -p publishes the port that llmux asks: write -p ${port}:8080")

    @pytest.mark.parametrize(
        "options", ["--network host", "-p 9000:9000 -p ${port}:80", "-p 127.0.0.1:${port}:80/tcp", "--pod x"]
    )
    def test_published_where_llmux_asks(self, options):
        cmd = f"podman run {options} image --port ${{port}}"
        assert ADAPTER.check(config(cmd=cmd), runtimes_dir=Path("/nonexistent")) == ()

    @cases("switch", ["-P=false", "-itP=0", "--publish-all=false", "--detach=false", "--http-proxy"])
    def test_not_refused(self, switch):
        """A switch that is off, and words after the image."""
        cmd = f"docker run {switch} -p ${{port}}:80 image -P -d"
        assert ADAPTER.check(config(cmd=cmd), runtimes_dir=Path("/nonexistent")) == ()


class TestEndpoints:
    """OpenAI's inference paths, or exactly those listed."""

    def test_default(self):
        endpoints = ADAPTER.endpoints(config())
        assert {endpoint.path for endpoint in endpoints} == set(DEFAULT_ENDPOINTS)
        assert {"/v1/chat/completions", "/v1/responses", "/v1/audio/speech", "/v1/rerank"} <= set(DEFAULT_ENDPOINTS)

    def test_listed(self):
        endpoints = ADAPTER.endpoints(config(endpoints=["/v1/x", "GET /voices", "POST /y"]))
        assert endpoints == {Endpoint("/v1/x"), Endpoint("/voices", "GET"), Endpoint("/y")}

    @pytest.mark.parametrize(
        ("loads", "plain", "pattern"), [(None, True, False), (True, False, False), (False, True, True)]
    )
    def test_looking(self, loads, plain, pattern):
        found = ADAPTER.endpoints(config(endpoints=["GET /slots", "GET /files/*", "/x"], loads=loads))
        assert {each.path: each.only_looks for each in found} == {"/slots": plain, "/files/*": pattern, "/x": False}

    @cases("text", ["v1/x", "DELETE /x", "/x?y=1", "", "/a/*/b", "GET /{}"])
    def test_refused(self, text):
        with pytest.raises(ValidationError, match="endpoints"):
            config(endpoints=[text])


class TestEstimate:
    """Files that are named give an estimate."""

    def test_by_file_size(self, tmp_path):
        file = tmp_path / "model.bin"
        file.write_bytes(b"")
        with file.open("r+b") as opened:
            opened.truncate(100 << 20)
        found = ADAPTER.estimate(config(files=[str(file)]))
        assert (found.mib, found.detail) == (130, "1 file of 100 MiB, times 1.3")
        assert ADAPTER.estimate(config(files=[str(file)] * 2)).detail == "2 files of 200 MiB, times 1.3"
        assert ADAPTER.estimate(config()) is None
