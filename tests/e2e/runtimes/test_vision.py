"""Models for pictures and texts in the embeddings runtime: real CLIP and SigLIP workers against what transformers computes."""

from __future__ import annotations

import math
from pathlib import Path

import openai
import pytest

from runtimes.embeddings.adapter import EmbeddingsAdapter, EmbeddingsConfig
from supervisor.host.process import procfs
from tests.support import environments, hf_folder, minilm, seeing
from tests.support.daemon import running

ADAPTER = EmbeddingsAdapter()
LABELS = ["a cat", "two dogs on a red sofa", "rain"]
PICTURES = [
    seeing.picture(64, 64, (250, 20, 20)),
    seeing.picture(90, 40, (20, 250, 120)),
    seeing.picture(33, 80, (10, 40, 250)),
]
TEMPLATE = "This is a photo of {}."


def config(**keys) -> EmbeddingsConfig:
    return EmbeddingsConfig(runtime="embeddings", **{"type": "vision", **keys})


def clip(folder: Path, **keys) -> Path:
    """A folder with a CLIP of zeros, for the adapter, which reads no weights."""
    return hf_folder.write(folder, {"architectures": ["CLIPModel"], "model_type": "clip", **keys}, template=None)


class TestAdapter:
    def test_a_model_that_sees(self, tmp_path):
        sees = config(path=str(clip(tmp_path)))
        assert ADAPTER.check(sees, runtimes_dir=Path()) == ()
        assert [endpoint.path for endpoint in ADAPTER.endpoints(sees)] == ["/v1/embeddings"]
        assert ADAPTER.capabilities(sees).modalities == ("text", "image")

    def test_the_type_has_to_be_said(self, tmp_path):
        (problem,) = ADAPTER.check(config(path=str(clip(tmp_path)), type="embedding"), runtimes_dir=Path())
        assert problem == f"type: {tmp_path} has a CLIPModel, for pictures and texts: say type: vision"

    def test_other_models_do_not_see(self):
        (problem,) = ADAPTER.check(config(path=str(minilm.folder())), runtimes_dir=Path())
        assert problem.startswith("type: vision is for CLIPModel, SiglipModel, Siglip2Model, and ")
        assert "names BertModel" in problem

    def test_it_does_not_rerank(self, tmp_path):
        (problem,) = ADAPTER.check(config(path=str(clip(tmp_path)), task="rerank"), runtimes_dir=Path())
        assert problem == "task: a model of type vision gives vectors and zero-shot scores; leave task out"

    def test_the_wider_encoder_counts(self, tmp_path):
        texts = {"hidden_size": 512, "intermediate_size": 2048}
        small, large = (
            ADAPTER.estimate(
                config(
                    path=str(clip(tmp_path / f"{width}", text_config=texts, vision_config={"hidden_size": width})),
                    max_batch_tokens=65536,
                )
            )
            for width in (512, 1152)
        )
        assert large.mib - small.mib == 65536 * 2 * (1152 - 512) * 12 >> 20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    environments.installed("embeddings")
    models = {
        kind: {"runtime": "embeddings", "type": "vision", "path": str(seeing.model(kind)), "threads": 1}
        for kind in seeing.KINDS
    }
    with running(tmp_path_factory.mktemp("vision"), {"models": models}) as started:
        yield started


def embed(daemon, kind, **body):
    return daemon.post("/v1/embeddings", json={"model": kind, **body})


def vectors(daemon, kind, **body):
    answer = embed(daemon, kind, **body)
    assert answer.status_code == 200, answer.text
    return [item["embedding"] for item in answer.json()["data"]]


class TestRequests:
    """What every kind does alike, asked of one."""

    @pytest.mark.parametrize(
        "item",
        [
            PICTURES[0],
            {"type": "image_url", "image_url": {"url": PICTURES[0]}},
            {"type": "image_url", "image_url": PICTURES[0]},
            {"image": PICTURES[0]},
            {"image": PICTURES[0].partition(",")[2]},
        ],
        ids=["data URL", "OpenAI's part", "part with a text", "object", "base64"],
    )
    def test_ways_to_send_a_picture(self, daemon, item):
        (plain,) = vectors(daemon, "clip", input=[PICTURES[0]])
        assert vectors(daemon, "clip", input=[item]) == [plain]

    def test_ways_to_send_a_text(self, daemon):
        plain, *others = vectors(daemon, "clip", input=["a cat", {"text": "a cat"}, {"type": "text", "text": "a cat"}])
        for other in others:
            assert other == pytest.approx(plain, abs=1e-5)

    def test_the_sdk(self, daemon):
        with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.embeddings.create(  # which asks for base64
                model="clip", input=PICTURES[:1], extra_body={"candidate_labels": LABELS}
            )
        (item,) = answer.data
        assert item.embedding == pytest.approx(vectors(daemon, "clip", input=PICTURES[:1])[0], abs=1e-6)
        assert [score["label"] for score in item.scores] == LABELS
        assert answer.usage.total_tokens > 0

    def test_dimensions(self, daemon):
        (full,), (short,) = (vectors(daemon, "clip", input="a cat", **more) for more in ({}, {"dimensions": 8}))
        scale = math.hypot(*full[:8])
        assert short == pytest.approx([value / scale for value in full[:8]], abs=1e-5)

    @pytest.mark.parametrize(
        ("body", "clue"),
        [
            ({"input": ""}, "input[0] must be a text"),
            ({"input": ["fine", [1, 2]]}, "input[1] must be a text"),
            ({"input": [{"type": "image_url"}]}, "input[0] must be a text"),
            ({"input": [{"text": "a", "image": PICTURES[0]}]}, "input[0] must be a text"),
            (
                {"input": ["a", *PICTURES, "data:image/png;base64,AAAA"]},
                "input[4]: the picture can't be read: it is none of PNG",
            ),
            ({"input": [seeing.broken()]}, "the picture can't be read: Python int too large"),
            ({"input": ["data:image/png;charset=utf-8,AAAA"]}, "must be a data URL"),
            ({"input": ["DATA:IMAGE/PNG;BASE64,AAAA"]}, "must be a data URL"),
            ({"input": ["data:image/png;base64,AAAA"] * 1024, "candidate_labels": ["a"] * 512}, "are 524288 scores"),
            ({"input": [{"image": "data:text/plain;base64,AAAA"}]}, "must be a data URL"),
            ({"input": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]}, "is not loaded"),
            ({"input": "word " * 90}, "and the model takes 77"),
            ({"input": "a cat", "candidate_labels": LABELS}, "input[0] is a text"),
            ({"input": PICTURES[:1], "candidate_labels": []}, "a list of labels"),
            ({"input": PICTURES[:1], "candidate_labels": ["a", " "]}, "a list of labels"),
            ({"input": PICTURES[:1], "candidate_labels": ["a", 1]}, "a list of at most 1000 strings"),
            ({"input": PICTURES[:1], "candidate_labels": ["word " * 90]}, "candidate_labels[0] has"),
            ({"input": PICTURES[:1], "candidate_labels": LABELS, "hypothesis_template": "a photo"}, "with {} in it"),
            ({"input": PICTURES[:1], "hypothesis_template": "a {}"}, "there are none"),
            ({"messages": [], "input": "a"}, "send pictures and texts as input"),
            ({"modality": "image", "input": "a"}, "each input says what it is"),
            ({"input": "a", "prompt_name": "query"}, "no prompts"),
        ],
    )
    def test_what_it_refuses(self, daemon, body, clue):
        refused = embed(daemon, "clip", **body)
        assert refused.status_code == 400, refused.text
        assert clue in refused.json()["error"]["message"]

    def test_a_long_text_may_be_cut(self, daemon):
        answer = embed(daemon, "clip", input="word " * 90, truncate=True)
        assert (answer.status_code, answer.json()["usage"]["prompt_tokens"]) == (200, 77)

    def test_large_pictures_are_in_memory_one_by_one(self, daemon):
        """A few KiB each as files, but 64 MB once decoded."""
        vectors(daemon, "clip", input=PICTURES)
        worker = Path("/proc", str(daemon.model("clip")["worker"]["pid"]))
        (worker / "clear_refs").write_text("5")  # forget the peak
        before = procfs.numbers((worker / "status").read_bytes())[b"VmRSS"]
        vectors(daemon, "clip", input=[seeing.picture(4000, 4000, (250, 20, 20))] * 16)
        grown = procfs.numbers((worker / "status").read_bytes())[b"VmHWM"] - before
        assert grown < 8 * 4 * 4000 * 4000 // 1024

    def test_it_is_listed_as_what_it_is(self, daemon):
        rows = daemon.get("/v1/models", params={"type": "vision"}).json()["data"]
        assert [row["id"] for row in rows] == list(seeing.KINDS)
        assert rows[0]["architecture"] == {"input_modalities": ["text", "image"], "output_modalities": ["embeddings"]}
        assert daemon.model("clip")["priority"] == 130


@pytest.fixture(scope="module", params=seeing.KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def own(kind):
    return seeing.own(kind, [TEMPLATE.replace("{}", label) for label in LABELS], PICTURES)


class TestValues:
    """Each kind's values are transformers' own, whatever else is in the batch."""

    def test_vectors(self, daemon, kind, own):
        texts = [TEMPLATE.replace("{}", label) for label in LABELS]
        mixed = [item for pair in zip(texts, PICTURES, strict=True) for item in pair]
        found = vectors(daemon, kind, input=mixed)
        expected = [row for pair in zip(own["texts"], own["pictures"], strict=True) for row in pair]
        assert found == [pytest.approx(row, abs=1e-5) for row in expected]
        alone = [vectors(daemon, kind, input=item)[0] for item in mixed]
        assert found == [pytest.approx(row, abs=1e-5) for row in alone]
        assert min(math.dist(a, b) for at, a in enumerate(found) for b in found[:at]) > 1e-3  # none is another's

    def test_more_than_are_prepared_at_once(self, daemon, kind):
        one, other, _ = vectors(daemon, kind, input=PICTURES)
        many = vectors(daemon, kind, input=[*[PICTURES[0]] * 20, PICTURES[1]])
        assert many == [*[pytest.approx(one, abs=1e-5)] * 20, pytest.approx(other, abs=1e-5)]

    def test_scores(self, daemon, kind, own):
        answer = embed(daemon, kind, input=PICTURES, candidate_labels=LABELS).json()
        for item, expected in zip(answer["data"], own["scores"], strict=True):
            assert [score["label"] for score in item["scores"]] == LABELS
            found = [score["score"] for score in item["scores"]]
            assert found == pytest.approx(expected, abs=1e-5)
            if kind == "clip":
                assert sum(found) == pytest.approx(1)
        assert answer["data"][0]["scores"] != answer["data"][1]["scores"]

    def test_a_template_of_ones_own(self, daemon, kind):
        whole, parts = (
            embed(daemon, kind, input=PICTURES, candidate_labels=labels, hypothesis_template=template).json()
            for labels, template in ((["a red cat", "a red dog"], "{}"), (["cat", "dog"], "a red {}"))
        )
        for one, other in zip(whole["data"], parts["data"], strict=True):
            assert [score["score"] for score in one["scores"]] == [
                pytest.approx(score["score"], abs=1e-6) for score in other["scores"]
            ]
