"""The playground with real workers: tools that a model calls, texts in order, pictures beside texts."""

from __future__ import annotations

import base64

import pytest
from playwright.sync_api import expect

from tests.e2e.runtimes.test_embeddings import cross_encoder
from tests.support import environments, seeing, tiny
from tests.support.daemon import gguf, running, wait_until

RED, BLUE = (seeing.picture(64, 64, colour) for colour in ((250, 20, 20), (10, 40, 250)))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    environments.installed("embeddings")
    models = {
        "caller": gguf(tiny.model(name="tiny-weather", tool_call=tiny.TOOL_CALL)),
        "reranker": {"runtime": "embeddings", "path": str(cross_encoder()), "threads": 1},
        "clip": {"runtime": "embeddings", "type": "vision", "path": str(seeing.model("clip")), "threads": 1},
    }
    with running(tmp_path_factory.mktemp("playground"), {"models": models}) as daemon:
        yield daemon


class TestTools:
    """A call is shown with its arguments, waits for a result, and the conversation goes on with it."""

    @pytest.mark.parametrize("width", [1280, 390])
    def test_one_is_called_and_answered(self, site, open_page, width):
        page = open_page(site, "playground/chat", width=width)
        page.get_by_text("Tools").click()
        page.get_by_label("Definitions, as JSON").fill("[{")
        expect(page.get_by_role("alert")).to_contain_text("The tools are not valid JSON")
        page.get_by_role("button", name="Example").click()
        page.get_by_label("Message").fill("How is the weather?")
        page.keyboard.press("Enter")
        expect(page.locator(".call code")).to_contain_text(f"{tiny.TOOL_CALL['name']}(")
        page.get_by_label(f"Result of {tiny.TOOL_CALL['name']}").fill("Sunny, 21 degrees")
        page.get_by_role("button", name="Go on").click()
        expect(page.locator(".turn.assistant").last).to_contain_text(tiny.ANSWER)
        expect(page.locator(".turn.user").last).to_contain_text("Sunny, 21 degrees")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


class TestRerank:
    """The best comes first."""

    def test_texts_are_put_in_order(self, site, open_page):
        page = open_page(site, "playground/rerank")
        expect(page.get_by_label("Model")).to_have_value("reranker")
        documents = ["cats are animals", "rates rose", "a dog"]
        page.get_by_label("Question").fill("what is a cat")
        page.get_by_label("Documents").fill("\n".join(documents))
        page.get_by_role("button", name="Rank").click()
        body = {"model": "reranker", "query": "what is a cat", "documents": documents}
        results = site.post("/v1/rerank", json=body).json()["results"]
        wanted = [f"{one['relevance_score']:.3f} {documents[one['index']]}" for one in results]
        expect(page.get_by_role("list", name="Ranked documents").get_by_role("listitem")).to_have_text(wanted)

    def test_a_reranker_is_no_model_for_embeddings(self, site, open_page):
        page = open_page(site, "playground/embeddings")
        wait_until(lambda: page.get_by_label("Model").locator("option").all_inner_texts() == ["clip"])


class TestPictures:
    """A model that sees compares pictures with texts."""

    def test_beside_texts(self, site, open_page):
        page = open_page(site, "playground/embeddings")
        page.get_by_label("Texts").fill("a cat")
        files = [
            {"name": f"{name}.png", "mimeType": "image/png", "buffer": base64.b64decode(url.partition(",")[2])}
            for name, url in (("red", RED), ("blue", BLUE))
        ]
        page.get_by_label("Pictures").set_input_files(files)
        page.get_by_role("button", name="Compare").click()
        rows = page.locator(".similarity tbody tr")
        expect(rows).to_have_count(3, timeout=120_000)  # its worker imports torch first
        expect(rows.nth(1).get_by_role("img", name="Picture 1")).to_be_visible()
        vectors = [
            one["embedding"]
            for one in site.post("/v1/embeddings", json={"model": "clip", "input": ["a cat", RED, BLUE]}).json()["data"]
        ]
        alike = sum(one * other for one, other in zip(vectors[1], vectors[2], strict=True))
        expect(rows.nth(1).locator("td").last).to_have_text(f"{alike:.3f}")
