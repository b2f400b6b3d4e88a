"""The embeddings runtime: what it says of a model folder, how requests are batched, and real workers on a real model."""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import struct
import threading
from pathlib import Path

import openai
import pytest

from runtimes.embeddings.adapter import EmbeddingsAdapter, EmbeddingsConfig
from tests.support import environments, minilm
from tests.support.daemon import running, wait_until
from tests.support.made_once import generated

ADAPTER = EmbeddingsAdapter()


def cross_encoder(labels: int = 1) -> Path:
    tokenizer = str(minilm.folder())
    return generated(f"cross-encoder-{labels}", "cross_encoder", "embeddings", tokenizer=tokenizer, labels=labels)


def config(**keys) -> EmbeddingsConfig:
    return EmbeddingsConfig(runtime="embeddings", **{"path": str(minilm.folder()), **keys})


class TestAdapter:
    """What a folder is for is read from it."""

    def test_an_embedding_model(self):
        assert ADAPTER.check(config(), runtimes_dir=Path()) == ()
        assert [endpoint.path for endpoint in ADAPTER.endpoints(config())] == ["/v1/embeddings"]
        assert ADAPTER.capabilities(config()).context == 256  # of the 512 that BERT takes
        assert config().type == "embedding"

    def test_a_cross_encoder(self):
        reranker = config(path=str(cross_encoder()))
        assert ADAPTER.check(reranker, runtimes_dir=Path()) == ()
        assert {endpoint.path for endpoint in ADAPTER.endpoints(reranker)} == {"/v1/rerank", "/rerank"}

    def test_a_classifier_is_no_reranker(self):
        (problem,) = ADAPTER.check(config(path=str(cross_encoder(3))), runtimes_dir=Path())
        assert "3 classes" in problem

    def test_no_folder(self, tmp_path):
        (problem,) = ADAPTER.check(config(path=str(tmp_path / "none")), runtimes_dir=Path())
        assert "there is no such folder" in problem
        assert ADAPTER.estimate(config(path=str(tmp_path / "none"))) is None

    def test_more_tokens_at_once_take_more(self):
        small, large = (ADAPTER.estimate(config(max_batch_tokens=tokens)) for tokens in (1024, 65536))
        assert large.mib - small.mib > 500


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    environments.installed("embeddings")
    models = {
        "minilm": {"runtime": "embeddings", "path": str(minilm.folder())},
        "reranker": {"runtime": "embeddings", "path": str(cross_encoder())},
    }
    with running(tmp_path_factory.mktemp("embeddings"), {"models": models}) as started:
        yield started


@pytest.fixture
def sdk(daemon):
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def cosine(a, b) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


class TestEmbeddings:
    """Real vectors of a real model, through the daemon, as its clients ask for them."""

    def embed(self, daemon, **body):
        return daemon.post("/v1/embeddings", json={"model": "minilm", **body})

    def test_a_field_that_nobody_knows_has_no_effect_and_is_named(self, daemon):
        told = self.embed(daemon, input="hello", brand_new=1, unset=None)
        assert (told.status_code, told.headers["x-llmux-ignored"]) == (200, "brand_new")
        assert told.json() == self.embed(daemon, input="hello").json()

    def test_similar_texts_are_near(self, sdk):
        texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose by a quarter point."]
        answer = sdk.embeddings.create(model="minilm", input=texts)  # the SDK asks for base64
        cat, kitten, rates = (item.embedding for item in answer.data)
        assert len(cat) == 384
        assert cosine(cat, kitten) > 0.5
        assert cosine(cat, rates) < 0.2
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 20

    def test_float_and_base64_are_the_same(self, daemon):
        plain = self.embed(daemon, input="hello", encoding_format="float").json()["data"][0]["embedding"]
        packed = self.embed(daemon, input="hello", encoding_format="base64").json()["data"][0]["embedding"]
        assert list(struct.unpack("<384f", base64.b64decode(packed))) == pytest.approx(plain, abs=1e-7)
        assert math.hypot(*plain) == pytest.approx(1, abs=1e-5)

    def test_batched_or_alone_it_is_the_same(self, daemon):
        texts = ["one", "a somewhat longer text with several words", "x " * 100]
        together = self.embed(daemon, input=texts).json()["data"]
        assert [item["index"] for item in together] == [0, 1, 2]
        for text, item in zip(texts, together, strict=True):
            alone = self.embed(daemon, input=text).json()["data"][0]["embedding"]
            assert item["embedding"] == pytest.approx(alone, abs=1e-5)

    def test_token_ids(self, daemon):
        by_text = self.embed(daemon, input="hello world").json()["data"][0]["embedding"]
        for ids in ([7592, 2088], [[7592, 2088]]):
            by_ids = self.embed(daemon, input=ids).json()["data"][0]["embedding"]
            assert by_ids == pytest.approx(by_text, abs=1e-5)

    def test_dimensions(self, daemon):
        full = self.embed(daemon, input="hello").json()["data"][0]["embedding"]
        short = self.embed(daemon, input="hello", dimensions=64).json()["data"][0]["embedding"]
        assert len(short) == 64
        assert math.hypot(*short) == pytest.approx(1, abs=1e-5)
        assert cosine(short, full[:64]) == pytest.approx(1)

    def test_too_long(self, daemon):
        refused = self.embed(daemon, input=["fine", "word " * 300])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "input[1] has 302 tokens, and the model takes 256" in refused.json()["error"]["message"]
        cut = self.embed(daemon, input=["fine", "word " * 300], truncate=True)
        assert (cut.status_code, cut.json()["usage"]["prompt_tokens"]) == (200, 3 + 256)

    @pytest.mark.parametrize(
        ("body", "clue"),
        [
            ({}, "input[0] must be a text"),
            ({"input": []}, "1 to 2048"),
            ({"input": ""}, "input[0] must be a text"),
            ({"input": ["a", 1]}, "input[1] must be a text"),
            ({"input": [[10**6]]}, "this model knows 30522"),
            ({"input": "a", "dimensions": 1000}, "from 1 to 384"),
            ({"input": "a", "encoding_format": "int8"}, "one of float, base64"),
            ({"input": "a", "prompt_name": "nonsense"}, "one of query, document"),
            ({"input": "a", "input_type": "query"}, "prompt_name"),
        ],
    )
    def test_what_it_refuses(self, daemon, body, clue):
        refused = self.embed(daemon, **body)
        assert refused.status_code == 400, refused.text
        assert clue in refused.json()["error"]["message"]

    def test_many_at_once(self, daemon):
        expected = [self.embed(daemon, input=f"text {i}").json()["data"][0]["embedding"] for i in range(4)]
        found: dict[int, list[float]] = {}

        def ask(number: int) -> None:
            found[number] = self.embed(daemon, input=f"text {number % 4}").json()["data"][0]["embedding"]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(24):
            assert found[number] == pytest.approx(expected[number % 4], abs=1e-5)

    def test_killed_while_it_works(self, daemon):
        pid = daemon.model("minilm")["worker"]["pid"] if daemon.model("minilm")["worker"] else None
        if pid is None:
            self.embed(daemon, input="load it")
            pid = daemon.model("minilm")["worker"]["pid"]
        answers = []
        asking = threading.Thread(target=lambda: answers.append(self.embed(daemon, input=["word " * 200] * 500)))
        asking.start()
        wait_until(lambda: daemon.model("minilm")["in_flight"] == 1)
        os.kill(pid, signal.SIGKILL)
        asking.join()
        assert answers[0].status_code >= 500
        daemon.wait_gone("minilm", pid)
        assert self.embed(daemon, input="again").status_code == 200
        assert daemon.model("minilm")["worker"]["pid"] != pid

    def test_estimate_and_measurement(self, daemon, record_property):
        self.embed(daemon, input=["word " * 250] * 32)  # as many as are computed at once

        memory = daemon.wait_foretold("minilm")
        estimate, measured = memory["estimate"]["mib"], memory["measured_mib"]
        record_property("estimate_mib", estimate)
        record_property("measured_mib", measured)
        assert memory["estimate"]["source"] == "computed"

    def test_chat_is_not_what_it_does(self, daemon):
        refused = daemon.chat("minilm")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")


class TestRerank:
    def rerank(self, daemon, **body):
        return daemon.post("/v1/rerank", json={"model": "reranker", "query": "what is a cat", **body})

    def test_order(self, daemon):
        documents = ["cats are animals", "rates rose", "a dog", {"text": "the cat sat"}]
        answer = self.rerank(daemon, documents=documents).json()
        scores = [result["relevance_score"] for result in answer["results"]]
        assert scores == sorted(scores, reverse=True)
        assert len(set(scores)) == 4
        assert sorted(result["index"] for result in answer["results"]) == [0, 1, 2, 3]
        for result in answer["results"]:
            document = documents[result["index"]]
            (alone,) = self.rerank(daemon, documents=[document]).json()["results"]
            assert alone["relevance_score"] == pytest.approx(result["relevance_score"], abs=1e-5)
        assert answer["usage"]["total_tokens"] > 0

    def test_a_field_that_nobody_knows_has_no_effect_and_is_named(self, daemon):
        told = self.rerank(daemon, documents=["a dog"], brand_new=1, unset=None)
        assert (told.status_code, told.headers["x-llmux-ignored"]) == (200, "brand_new")

    def test_the_best(self, daemon):
        documents = ["cats are animals", "rates rose", "a dog"]
        every = self.rerank(daemon, documents=documents).json()["results"]
        answer = self.rerank(daemon, documents=documents, top_n=2, return_documents=True).json()
        assert [result["index"] for result in answer["results"]] == [result["index"] for result in every[:2]]
        assert all(result["document"]["text"] == documents[result["index"]] for result in answer["results"])

    def test_a_part_of_each_document(self, daemon):
        """As Cohere's clients ask for it: after so many tokens nothing counts, however long the document is."""
        long = "cats are animals " + "word " * 200
        answer = self.rerank(daemon, documents=[long, "a dog"], max_tokens_per_doc=3, return_documents=True)
        assert answer.status_code == 200, answer.text
        alone = self.rerank(daemon, documents=["cats are animals", "a dog"]).json()
        scores = {result["index"]: result["relevance_score"] for result in answer.json()["results"]}
        for result in alone["results"]:
            assert scores[result["index"]] == pytest.approx(result["relevance_score"], abs=1e-5)
        assert answer.json()["usage"] == alone["usage"]
        assert {result["document"]["text"] for result in answer.json()["results"]} == {long, "a dog"}

    @pytest.mark.parametrize(
        ("body", "clue"),
        [
            ({"documents": []}, "a list of 1 to 2048 texts"),
            ({"documents": ["a"], "query": ""}, "query is needed"),
            ({"documents": [1]}, "documents[0] must be a text"),
            ({"documents": [{"text": "a", "title": "b"}]}, "only text can be compared"),
            ({"documents": ["word " * 200]}, "documents[0] has"),
            ({"documents": ["a"], "top_n": 0}, "top_n"),
            ({"documents": ["a"], "max_chunks_per_doc": 2}, "not split"),
            ({"documents": ["a"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
            ({"documents": ["a"], "relevant_spans": {"mode": "enabled"}}, "whole documents"),
        ],
    )
    def test_what_it_refuses(self, daemon, body, clue):
        refused = self.rerank(daemon, **body)
        assert refused.status_code == 400, refused.text
        assert clue in json.dumps(refused.json()["error"])
