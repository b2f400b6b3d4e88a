"""On a machine that has never run the tests, each program that writes models for them writes one.

Elsewhere the cache hides what has broken since it was filled.
"""

from __future__ import annotations

import pytest

from tests.e2e.runtimes import test_embeddings
from tests.support import hearing, made_once, seeing, tiny, tiny_ctranslate2, tiny_language, tiny_pictures

SAMPLES = {
    "projector": tiny.projector,
    "language": tiny_language.model,
    "ctranslate2": tiny_ctranslate2.language,
    "whisper": hearing.converted,
    "whisper_ggml": hearing.ggml,
    "cohere": hearing.cohere,
    "sounds": hearing.sounds,
    "seeing": lambda: seeing.model("clip"),
    "cross_encoder": test_embeddings.cross_encoder,
    "diffusion": tiny_pictures.model,
}
OTHERS = {
    "answers": "writes nothing",
    "decoding": "writes nothing",
    "write_chatterbox": "its environment takes gigabytes: make test-chatterbox",
}


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr(made_once, "FOLDER", folder)
        yield folder


@pytest.mark.parametrize("generator", SAMPLES)
def test_a_sample(generator, empty):
    path = SAMPLES[generator]()
    assert path.is_relative_to(empty)
    assert path.stat().st_size > 0


def test_every_program_has_one():
    programs = {path.stem for path in made_once.GENERATORS.glob("*.py")}
    assert programs == SAMPLES.keys() | OTHERS.keys()
