"""Whisper by size: `model: small` is a repository to get, a folder to load from, and a name that clients know it by."""

from __future__ import annotations

import json
import subprocess

import pytest

from runtimes.adapters import whisper_sizes
from supervisor.catalog import load
from supervisor.catalog.models import sources
from supervisor.errors import ConfigError
from tests.support import hearing
from tests.support.limits import LIMIT_S


def written(folder, model: str):
    file = folder / "llmux.yaml"
    file.write_text(f"server: {{models_dir: {folder}/models}}\nmodels:\n  ears: {model}\n")
    return file


def loaded(folder, model: str):
    return load(written(folder, model), check_files=False).models["ears"]


class TestSizes:
    """Each is a repository, which its key alone names."""

    def test_the_library_has_the_same_repositories(self):
        code = "import json; from faster_whisper.utils import _MODELS; print(json.dumps(_MODELS))"
        words = [hearing.python("faster_whisper"), "-I", "-c", code]
        theirs = json.loads(subprocess.run(words, check=True, capture_output=True, timeout=LIMIT_S).stdout)
        ours = {size: whisper_sizes.converted(size).repo for size in whisper_sizes.SIZES}
        assert ours == {size: theirs[size] for size in ours}

    def test_names(self):
        assert {"large", "whisper-large", "openai/whisper-large-v3"} <= {*whisper_sizes.names("large-v3")}
        assert whisper_sizes.names(None) == ()


class TestConfiguration:
    """`model:` stands for the source, and the path follows from it."""

    def test_a_size_alone(self, tmp_path):
        model = loaded(tmp_path, "{runtime: faster_whisper, model: small}")
        assert model.config.source.repo == "Systran/faster-whisper-small"
        assert model.config.path == tmp_path / "models/Systran/faster-whisper-small"
        assert "whisper-small" in model.adapter.known_as(model.config)

    def test_ones_own_path_and_source_win(self, tmp_path):
        model = loaded(tmp_path, "{runtime: faster_whisper, model: small, path: /m, source: {repo: acme/own}}")
        assert (model.config.source.repo, str(model.config.path)) == ("acme/own", "/m")

    def test_of_whisper_cpp_it_is_one_file(self, tmp_path):
        model = loaded(tmp_path, "{runtime: whisper_cpp, model: turbo, quantization: q5_0}")
        assert model.config.source.files == ["ggml-large-v3-turbo-q5_0.bin"]
        folder = tmp_path / "models/ggerganov/whisper.cpp"
        assert model.config.path == folder / "ggml-large-v3-turbo-q5_0.bin"
        assert sources.folder(model.config.source, model.config, tmp_path / "models") == folder

    def test_missing_files_name_the_command(self, tmp_path):
        model = load(written(tmp_path, "{runtime: faster_whisper, model: small}")).models["ears"]
        assert model.trouble.endswith("there is no such folder; get it: llmux pull ears")

    def test_an_unknown_size_lists_the_sizes(self, tmp_path):
        with pytest.raises(ConfigError) as caught:
            loaded(tmp_path, "{runtime: faster_whisper, model: huge}")
        assert any("tiny" in problem and "turbo" in problem for problem in caught.value.problems), caught.value.problems
