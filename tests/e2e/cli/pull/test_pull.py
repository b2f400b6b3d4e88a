"""`llmux pull`: what comes, what doesn't come twice, and what a broken line, a locked gate or a full disk do to it."""

from __future__ import annotations

import hashlib
import os
import signal
import threading

import pytest

from supervisor.cli.exit_codes import ExitCode
from supervisor.cli.models import pull as pulling
from supervisor.host.hub import hub as hub_files
from supervisor.host.hub import hub_download
from supervisor.host.hub.download import File
from tests.e2e.cli.pull.conftest import MIB, content
from tests.support.daemon import wait_until
from tests.support.fake_hub import Repo
from tests.support.limits import LIMIT_S

TINY = {"config.json", "tokenizer.json", "model.safetensors"}


class TestFetching:
    """All that is named comes, once."""

    def test_everything_that_the_configuration_names(self, pull, hub):
        done = pull()
        assert done.returncode == ExitCode.DONE, done.stderr
        assert pull.names("acme/tiny") == TINY
        assert pull.names("acme/tiny-gguf") == {"tiny-Q4_K_M.gguf", "mmproj-F16.gguf"}
        for repo in ("acme/tiny", "acme/tiny-gguf"):
            for name in pull.names(repo):
                assert (pull.models_dir / repo / name).read_bytes() == hub.repos[repo].files[name]
        assert "model.safetensors" in done.stderr
        assert "0 MiB to get" in done.stdout

    def test_a_whisper_by_its_size(self, pull, hub):
        files = {"config.json": b"{}", "model.bin": content(70_000, 9), "tokenizer.json": b"{}", "vocabulary.txt": b"a"}
        hub.repos["Systran/faster-whisper-tiny"] = Repo(files, large=frozenset({"model.bin"}))
        pull.models = {"ears": {"runtime": "faster_whisper", "model": "tiny"}}
        assert pull().returncode == ExitCode.DONE
        assert pull.names("Systran/faster-whisper-tiny") == {*files}

    def test_a_whisper_of_whisper_cpp_is_one_file_of_many(self, pull, hub):
        files = {f"ggml-{name}.bin": content(70_000, 10 + at) for at, name in enumerate(("tiny", "tiny-q5_1", "base"))}
        hub.repos["ggerganov/whisper.cpp"] = Repo(files, large=frozenset(files))
        pull.models = {"ears": {"runtime": "whisper_cpp", "model": "tiny", "quantization": "q5_1"}}
        assert pull().returncode == ExitCode.DONE
        assert pull.names("ggerganov/whisper.cpp") == {"ggml-tiny-q5_1.bin"}

    def test_a_second_time_nothing_comes(self, pull, hub):
        pull()
        sent = hub.sent.copy()
        again = pull()
        assert again.returncode == ExitCode.DONE
        assert hub.sent == sent

    def test_named_models_only(self, pull):
        pull.models["other"] = {"runtime": "transformers", "source": {"repo": "acme/nowhere"}}
        assert pull("small").returncode == ExitCode.DONE
        assert not (pull.models_dir / "acme/tiny").exists()

    def test_two_models_of_one_repository_fetch_it_once(self, pull, hub):
        pull.models = {"a": pull.models["tiny"], "b": pull.models["tiny"]}
        assert [row["models"] for row in pull.rows()] == [["a", "b"]]
        assert hub.sent["model.safetensors"] == 5 * MIB

    def test_two_models_share_what_both_need_of_one_repository(self, pull, hub):
        projector, files = "mmproj-F16.gguf", ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")
        pull.models = {name: {"source": {"repo": "acme/tiny-gguf", "files": [name, projector]}} for name in files}
        (row,) = pull.rows()
        assert {file["name"] for file in row["files"]} == {*files, projector}
        assert hub.sent[projector] == MIB

    def test_another_revision_replaces_what_differs(self, pull, hub):
        pull("tiny")
        sent = hub.sent.copy()
        pull.models["tiny"]["source"]["revision"] = "v2"
        assert pull.rows("tiny", "--dry-run")[0]["missing_bytes"] == 5 * MIB
        assert pull("tiny").returncode == ExitCode.DONE
        path = pull.models_dir / "acme/tiny/model.safetensors"
        assert path.read_bytes() == content(5 * MIB, 12)
        assert hub.sent - sent == {"model.safetensors": 5 * MIB}

    def test_where_the_path_says(self, pull, tmp_path):
        pull.models["tiny"]["path"] = str(tmp_path / "mine")
        pull.models["small"]["path"] = str(tmp_path / "ggufs" / "tiny-Q4_K_M.gguf")
        assert pull().returncode == ExitCode.DONE
        assert (tmp_path / "mine/model.safetensors").exists()
        assert (tmp_path / "ggufs/tiny-Q4_K_M.gguf").exists()

    def test_a_path_that_nothing_comes_to(self, pull, tmp_path):
        pull.models = {"small": pull.models["small"] | {"path": str(tmp_path / "ggufs" / "another.gguf")}}
        done = pull()
        assert done.returncode == ExitCode.FAILED
        assert "isn't among the files" in done.stderr

    def test_all_files_where_there_are_no_safetensors(self, pull, hub):
        hub.repos["acme/whisper-ct2"] = Repo({"model.bin": content(1000), "vocabulary.json": b"[]"})
        pull.models = {"ears": {"runtime": "transformers", "source": {"repo": "acme/whisper-ct2"}}}
        assert pull().returncode == ExitCode.DONE
        assert pull.names("acme/whisper-ct2") == {"model.bin", "vocabulary.json"}

    def test_virtual_names_stand_for_their_models(self, pull):
        pull.virtual["little"] = {"model": "small", "enable_thinking": False}
        assert [row["models"] for row in pull.rows("little", "small", "--dry-run")] == [["small"]]
        assert pull("nobody").returncode == ExitCode.NOT_FOUND


class TestDryRun:
    """What would come, and nothing kept of it."""

    def test_lists_sizes(self, pull, hub):
        tiny, small = pull.rows("--dry-run")
        assert tiny["size_bytes"] == tiny["missing_bytes"] == 5 * MIB + 70_000 + 24
        assert tiny["commit"] == "a" * 40
        assert {file["name"] for file in small["files"]} == {"tiny-Q4_K_M.gguf", "mmproj-F16.gguf"}
        assert set(hub.sent) == {"config.json"}, "which tells whether kernels are needed; it is not kept"
        assert not pull.models_dir.exists()

    def test_counts_what_is_there(self, pull):
        pull("small")
        told = pull("--dry-run").stdout
        assert "10 MiB total, 6 MiB to get" in told


class TestBrokenLines:
    """What has come is kept."""

    def test_goes_on_where_the_line_broke(self, pull, hub):
        hub.cuts["model.safetensors"] = [2 * MIB, MIB, 1]
        done = pull("tiny")
        assert done.returncode == ExitCode.DONE, done.stderr
        assert hub.sent["model.safetensors"] == 5 * MIB
        assert done.stderr.count("going on") == 3

    def test_goes_on_after_being_killed(self, pull, hub):
        hub.hold["model.safetensors"] = threading.Event()
        hub.half_way["model.safetensors"] = threading.Event()
        part = pull.models_dir / "acme/tiny"
        with pull.start("tiny") as process:
            assert hub.half_way["model.safetensors"].wait(LIMIT_S)
            wait_until(lambda: any(path.stat().st_size >= 2 * MIB for path in part.glob("model.safetensors.*.part")))
            process.send_signal(signal.SIGKILL)
        hub.hold.pop("model.safetensors").set()
        sent = hub.sent["model.safetensors"]
        assert pull("tiny").returncode == ExitCode.DONE
        assert hub.sent["model.safetensors"] - sent <= 3 * MIB
        assert pull.names("acme/tiny") == TINY

    def test_two_at_once_fetch_it_once(self, pull, hub):
        hub.hold["model.safetensors"] = threading.Event()
        hub.half_way["model.safetensors"] = threading.Event()
        with pull.start("tiny") as first:
            assert hub.half_way["model.safetensors"].wait(LIMIT_S)
            with pull.start("tiny") as second:
                assert second.stderr is not None
                assert any("waiting for another pull" in line for line in second.stderr)
                hub.hold["model.safetensors"].set()
                assert second.wait(LIMIT_S) == first.wait(LIMIT_S) == ExitCode.DONE
        assert hub.sent["model.safetensors"] == 5 * MIB
        assert pull.names("acme/tiny") == TINY

    def test_a_hub_that_ignores_ranges(self, pull, hub):
        hub.cuts["model.safetensors"] = [2 * MIB]
        hub.ranges = False
        assert pull("tiny").returncode == ExitCode.DONE
        assert hub.sent["model.safetensors"] == 7 * MIB

    def test_errors_that_pass(self, pull, hub):
        hub.errors["tokenizer.json"] = [503, 429, 500]
        assert pull("tiny").returncode == ExitCode.DONE

    def test_an_error_that_stays(self, pull, hub):
        hub.errors["tokenizer.json"] = [503] * 50
        done = pull()
        assert done.returncode == ExitCode.FAILED
        assert "503" in done.stderr
        assert pull.names("acme/tiny-gguf") == {"tiny-Q4_K_M.gguf", "mmproj-F16.gguf"}  # the others came all the same

    def test_no_hub_at_all(self, pull):
        done = pull(HF_ENDPOINT="http://127.0.0.1:9")
        assert done.returncode == ExitCode.FAILED
        assert "can't be reached" in done.stderr
        assert done.stdout.splitlines()[-1] == "No repository could be looked at."

    def test_a_sum_of_what_could_be_looked_at(self, pull):
        pull.models["other"] = {"runtime": "transformers", "source": {"repo": "acme/nowhere"}}
        done = pull("--dry-run")
        assert done.returncode == ExitCode.FAILED
        told = "10 MiB total, 10 MiB to get, beside 1 of 3 that could not be looked at."
        assert done.stdout.splitlines()[-1] == told

    def test_offline_by_the_persons_own_setting(self, pull):
        done = pull(HF_HUB_OFFLINE="1")
        assert done.returncode == ExitCode.FAILED
        assert "HF_HUB_OFFLINE" in done.stderr + done.stdout


class TestContent:
    """A file is there when its hash is what the hub says."""

    @pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
    def test_a_flipped_bit_is_fetched_again(self, pull, hub, name):
        hub.corrupt[name] = 1
        done = pull("tiny")
        assert done.returncode == ExitCode.DONE
        assert "another hash" in done.stderr
        assert (pull.models_dir / "acme/tiny" / name).read_bytes() == hub.repos["acme/tiny"].files[name]

    def test_wrong_content_is_never_taken(self, pull, hub):
        hub.corrupt["model.safetensors"] = 99
        done = pull("tiny")
        assert done.returncode == ExitCode.FAILED
        assert "another hash" in done.stderr
        assert not (pull.models_dir / "acme/tiny/model.safetensors").exists()

    def test_a_file_cut_short_or_changed_is_fetched_again(self, pull, hub):
        pull("tiny")
        path = pull.models_dir / "acme/tiny/model.safetensors"
        for damage in (path.read_bytes()[:-1], b"x" + path.read_bytes()[1:]):
            path.write_bytes(damage)
            assert pull("tiny").returncode == ExitCode.DONE
            assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(content(5 * MIB, 2)).digest()

    def test_a_change_that_left_no_trace_is_found_by_verify(self, pull):
        pull("tiny")
        path = pull.models_dir / "acme/tiny/model.safetensors"
        stat = path.stat()
        path.write_bytes(b"x" + path.read_bytes()[1:])
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert pull.rows("tiny", "--dry-run")[0]["missing_bytes"] == 0
        assert pull("tiny", "--verify").returncode == ExitCode.DONE
        assert path.read_bytes() == content(5 * MIB, 2)

    def test_files_that_were_there_before_are_taken_when_they_are_right(self, pull, hub):
        folder = pull.models_dir / "acme/tiny"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(content(5 * MIB, 2))
        assert pull("tiny").returncode == ExitCode.DONE
        assert "model.safetensors" not in hub.sent


class TestMoreThanListed:
    """A hub that sends more than it said fills no disk and no memory."""

    @pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
    def test_a_file_stops_at_its_listed_size(self, pull, hub, name):
        hub.endless.add(name)
        assert pull("tiny").returncode == ExitCode.DONE
        assert (pull.models_dir / "acme/tiny" / name).stat().st_size == len(hub.repos["acme/tiny"].files[name])
        assert hub.sent[name] < 100 * MIB

    def test_another_file_of_the_listed_size_is_not_taken(self, pull, hub):
        hub.endless.add("tokenizer.json")
        hub.listed["tokenizer.json"] = {"size": 1004}
        done = pull("tiny")
        assert done.returncode == ExitCode.FAILED
        assert "another hash" in done.stderr
        assert not list((pull.models_dir / "acme/tiny").glob("tokenizer*"))
        assert hub.sent["tokenizer.json"] < 100 * MIB

    def test_a_description(self, pull, hub):
        hub.endless.add("config.json")
        done = pull("tiny", "--dry-run")
        assert done.returncode == ExitCode.FAILED
        assert "acme/tiny: config.json is longer than" in done.stdout
        assert hub.sent["config.json"] < 100 * MIB

    def test_a_listing(self, pull, hub):
        hub.endless.add("acme/tiny")
        done = pull("tiny")
        assert done.returncode == ExitCode.FAILED
        assert "acme/tiny: the hub's listing of it is longer than" in done.stdout + done.stderr
        assert hub.sent["acme/tiny"] < 200 * MIB

    def test_a_listing_of_nonsense(self, pull, hub):
        nonsense = [
            {"size": -1},
            {"size": None},
            {"size": "5"},
            {"blobId": "../../../../x"},
            {"blobId": None},
            {"lfs": {}},
            {"lfs": 5},
        ]
        pull.models = {}
        for number, said in enumerate(nonsense):
            hub.repos[f"acme/odd-{number}"] = Repo({f"{number}.json": b"{}"})
            hub.listed[f"{number}.json"] = said
            pull.models[f"odd-{number}"] = {"runtime": "transformers", "source": {"repo": f"acme/odd-{number}"}}
        done = pull()
        assert done.returncode == ExitCode.FAILED
        told = (done.stdout + done.stderr).splitlines()
        for number, said in enumerate(nonsense):
            assert any(f"acme/odd-{number}:" in line and "is it a model hub?" in line for line in told), said


class TestGate:
    """Gated and private repositories."""

    @pytest.fixture(autouse=True)
    def gated(self, hub):
        hub.repos["acme/tiny"].gated = True

    def test_says_what_to_do_without_a_token(self, pull, hub):
        done = pull("tiny")
        assert done.returncode == ExitCode.FAILED
        assert f"{hub.url}/acme/tiny" in done.stderr
        assert "HF_TOKEN" in done.stderr

    def test_a_token_that_may_not(self, pull):
        assert "accept its terms" in pull("tiny", HF_TOKEN="hf_bad").stderr

    def test_opens_with_a_token_which_the_cdn_never_sees(self, pull, hub):
        assert pull("tiny", HF_TOKEN="hf_good").returncode == ExitCode.DONE
        assert hub.tokens_at_cdn == {None}

    def test_a_token_kept_in_hf_home(self, pull, tmp_path):
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf/token").write_text("hf_good")
        assert pull("tiny", HF_HOME=str(tmp_path / "hf")).returncode == ExitCode.DONE

    def test_dry_run_tells(self, pull):
        assert "(gated)" in pull("--dry-run").stdout


class TestMistakes:
    """Names that lead nowhere, and configurations without sources."""

    def test_told(self, pull):
        mistakes = [
            ({"repo": "acme/nowhere"}, "no such repository"),
            ({"repo": "acme/tiny", "revision": "v9"}, "no revision 'v9'"),
            ({"repo": "acme/tiny-gguf", "files": ["weights.safetensors"]}, "tiny-Q8_0.gguf"),
        ]
        pull.models = {f"m{n}": {"runtime": "transformers", "source": source} for n, (source, _) in enumerate(mistakes)}
        done = pull("--dry-run")
        assert done.returncode == ExitCode.FAILED
        for source, told in mistakes:
            assert any(source["repo"] in line and told in line for line in done.stdout.splitlines()), done.stdout

    def test_a_model_without_a_source(self, pull, tmp_path):
        pull.models["mine"] = {"path": str(tmp_path / "mine.gguf")}
        assert pull("mine").returncode == ExitCode.NOT_FOUND
        del pull.models["tiny"], pull.models["small"]
        assert "names a source" in pull().stdout

    def test_names_that_are_no_names(self, pull, hub):
        """Each in a repository of its own."""
        names = [
            "../../evil",
            "/evil",
            "",
            ".",
            "./a",
            "a//b",
            "a/",
            "a\0b",
            "a\x1b[31m",
            ".llmux-pull.json",
            ".llmux-pull.hub/x",
        ]
        pull.models = {}
        for number, name in enumerate(names):
            hub.repos[f"acme/odd-{number}"] = Repo({**hub.repos["acme/tiny"].files, name: b"x"})
            pull.models[f"odd-{number}"] = {"runtime": "transformers", "source": {"repo": f"acme/odd-{number}"}}
        done = pull()
        assert done.returncode == ExitCode.FAILED
        told = (done.stdout + done.stderr).splitlines()
        for number, name in enumerate(names):
            assert any(f"acme/odd-{number}:" in line and "is no name for a file" in line for line in told), name
        assert not pull.models_dir.exists()

    def test_a_broken_description_names_itself(self, pull, hub):
        for broken in (b'{"model_type": ', b"[" * 100_000):
            hub.repos["acme/tiny"].files["config.json"] = broken
            done = pull("tiny")
            assert done.returncode == ExitCode.FAILED
            assert "acme/tiny: its config.json can't be read" in done.stdout + done.stderr

    def test_a_disk_that_is_too_small(self, pull):
        wanted = pulling.Download(hub_files.Source(repo="acme/tiny"), pull.home / "models", [])
        wanted.copy = hub_download.Copy(
            hub_files.Listing("acme/tiny", "a" * 40, False, (File("a", 1 << 60, "0" * 64),)), wanted.folder
        )
        wanted.missing = list(wanted.files)
        with pytest.raises(pulling.PullError, match="make room"):
            pulling.make_room([wanted])

    def test_without_the_hubs_client(self, pull, tmp_path):
        (tmp_path / "huggingface_hub.py").write_text("raise ImportError('not here')\n")
        done = pull(PYTHONPATH=f"{tmp_path}:{pull.environment()['PYTHONPATH']}")
        assert done.returncode == ExitCode.FAILED
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert "can't be loaded (not here): reinstall llmux" in line
