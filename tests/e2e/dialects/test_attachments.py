"""Pictures and documents that agents read stay in their conversations: no model is refused for ever because of one."""

from __future__ import annotations

import base64
import io

import pillow_heif
import pytest
from PIL import Image

from tests.support import tiny
from tests.support.daemon import gguf, running

UNSEEN = "[image: this model takes text only]"


def pdf(text: str) -> str:
    """A page that says this, in base64."""
    said = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >> stream\n%b\nendstream" % (len(said), said),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    body, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj %b endobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"xref\n0 6\n0000000000 65535 f \n%btrailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    return base64.b64encode(body + end % (table, len(body))).decode()


def picture(form: str) -> str:
    out = io.BytesIO()
    pillow_heif.register_heif_opener()
    Image.new("RGB", (64, 64), (200, 10, 10)).save(out, form)
    return base64.b64encode(out.getvalue()).decode()


PNG, WEBP = picture("PNG"), picture("WEBP")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    config = {
        "models": {"blind": gguf(n_ctx=8192), "eyes": gguf(mmproj=str(tiny.projector()), n_ctx=4096)},
        "tasks": {"either": {"candidates": ["blind", "eyes"]}},
    }
    with running(tmp_path_factory.mktemp("attachments"), config) as daemon:
        yield daemon


def user(*parts):
    return {"role": "user", "content": [*parts]}


TEXT = {"type": "text", "text": "What is it?"}
OPENAI = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
EXTENSION_FIELDS = {"role": "assistant", "content": "A hat."}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "Read", "input": {}}]}
READ = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a.png"}, ANTHROPIC]}
TOOLS = [{"name": "Read", "input_schema": {"type": "object"}}]
EARLIER = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [user(TEXT, OPENAI), EXTENSION_FIELDS, user(TEXT)]},
        "messages[0].content[1]",
    ),
    "messages": (
        "/v1/messages",
        {"max_tokens": 9, "tools": TOOLS, "messages": [user(TEXT), CALL, user(READ)]},
        "messages[2].content[0].content[1]",
    ),
    "behind a result": (
        "/v1/chat/completions",
        {
            "messages": [
                user(TEXT),
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "read"},
                user(OPENAI),
            ]
        },
        "messages[3].content[0]",
    ),
    "count": (
        "/v1/messages/count_tokens",
        {"messages": [user(TEXT, ANTHROPIC), EXTENSION_FIELDS, user(TEXT)]},
        "messages[0].content[1]",
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "Look at it."},
                {"type": "function_call", "call_id": "c1", "name": "view", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c1",
                    "output": [{"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}],
                },
            ]
        },
        "input[2].output[0]",
    ),
    "ollama": (
        "/api/chat",
        {
            "stream": False,
            "messages": [
                {"role": "user", "content": "x", "images": [PNG]},
                EXTENSION_FIELDS,
                {"role": "user", "content": "y"},
            ],
        },
        "messages[0].images",
    ),
}


class TestPictures:
    """On a model that doesn't see."""

    @pytest.mark.parametrize("case", EARLIER)
    def test_an_earlier_one_is_a_text(self, site, case):
        path, fields, named = EARLIER[case]
        told = site.post(path, json={"model": "blind", **fields})
        assert told.status_code == 200, told.text
        assert named in told.headers["x-llmux-ignored"]

    def test_what_the_model_reads_of_it(self, site):
        """The tokens of that text, and nothing of the picture."""
        path, fields, _ = EARLIER["chat"]
        instead = [user(TEXT, {"type": "text", "text": UNSEEN}), EXTENSION_FIELDS, user(TEXT)]
        counts = [
            site.post(path, json={"model": "blind", "messages": each, "max_tokens": 2}).json()["usage"]["prompt_tokens"]
            for each in (fields["messages"], instead)
        ]
        assert counts[0] == counts[1]

    @pytest.mark.parametrize(
        ("path", "fields"),
        [
            ("/v1/chat/completions", {"messages": [user(TEXT, OPENAI)]}),
            ("/v1/messages", {"max_tokens": 9, "messages": [user(TEXT), EXTENSION_FIELDS, user(ANTHROPIC, TEXT)]}),
            ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": [PNG]}]}),
            ("/v1/chat/completions", {"messages": [user(OPENAI), user(TEXT)]}),
        ],
    )
    def test_the_users_last_word_is_refused(self, site, path, fields):
        told = site.post(path, json={"model": "blind", **fields})
        assert told.status_code == 400
        assert "Could not process image" in told.text
        assert "eyes" in told.text, "a model that sees"

    @pytest.mark.parametrize(
        ("api", "form"),
        [
            *(("chat", form) for form in ("PNG", "WEBP", "AVIF", "HEIF", "GIF")),
            *(("messages", form) for form in ("PNG", "WEBP", "AVIF", "HEIF", "GIF")),
            *(("ollama", form) for form in ("PNG", "WEBP", "GIF")),  # it takes no others
        ],
    )
    def test_a_model_that_sees_gets_what_it_can_open(self, site, api, form):
        data = picture(form)
        asked = {
            "chat": (
                "/v1/chat/completions",
                user(TEXT, {"type": "image_url", "image_url": {"url": f"data:image/x;base64,{data}"}}),
            ),
            "messages": (
                "/v1/messages",
                user(TEXT, {"type": "image", "source": {"type": "base64", "media_type": "image/webp", "data": data}}),
            ),
            "ollama": ("/api/chat", {"role": "user", "content": "x", "images": [data]}),
        }
        path, message = asked[api]
        told = site.post(path, json={"model": "eyes", "max_tokens": 4, "stream": False, "messages": [message]})
        assert told.status_code == 200, told.text

    def test_a_broken_one(self, site):
        data = base64.b64encode(base64.b64decode(picture("WEBP"))[:40]).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/webp;base64,{data}"}}
        told = site.post("/v1/chat/completions", json={"model": "eyes", "messages": [user(TEXT, part)]})
        assert (told.status_code, told.json()["error"]["code"]) == (400, "invalid_media")
        assert told.json()["error"]["message"].startswith("Could not process image: ")

    @pytest.mark.parametrize(
        ("data", "ignored"),
        [
            (WEBP[:80], "image"),  # it can't be opened
            (f"{WEBP[:76]}\n{WEBP[76:]}", None),
        ],
    )
    def test_an_earlier_one_does_no_harm(self, site, data, ignored):
        part = {"type": "image_url", "image_url": {"url": f"data:image/webp;base64,{data}"}}
        told = site.post(
            "/v1/chat/completions", json={"model": "eyes", "messages": [user(TEXT, part), EXTENSION_FIELDS, user(TEXT)]}
        )
        assert (told.status_code, told.headers.get("x-llmux-ignored")) == (200, ignored), told.text

    def test_what_is_no_base64(self, site):
        """Its worker judges it."""
        part = {"type": "image_url", "image_url": {"url": f"data:image/webp;base64,{WEBP[:65]}"}}
        told = site.post("/v1/chat/completions", json={"model": "eyes", "messages": [user(TEXT, part)]})
        assert told.status_code == 400, told.text

    def test_a_text_that_looks_like_one(self, site):
        told = site.post(
            "/v1/chat/completions",
            json={"model": "eyes", "messages": [user({"type": "text", "text": "UklGRAAAAAAXRUJQV"})]},
        )
        assert told.status_code == 200, told.text

    def test_a_task_asks_who_sees(self, site):
        told = site.post(
            "/v1/chat/completions",
            json={"model": "either", "max_tokens": 4, "messages": [user(TEXT, OPENAI), EXTENSION_FIELDS, user(TEXT)]},
        )
        assert (told.status_code, told.headers["x-llmux-model"]) == (200, "eyes"), told.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
@pytest.mark.parametrize("kind", [["image"], {}, 5, None])
def test_a_part_whose_type_is_none(site, path, kind):
    field = "input" if path == "/v1/responses" else "messages"
    told = site.post(path, json={"model": "blind", "max_tokens": 4, field: [user({"type": kind, "text": "x"})]})
    assert told.status_code < 500, told.text


DOCUMENTS = [
    ("/v1/messages", {"type": "document", "title": "a.pdf", "source": {"type": "base64", "media_type": "application/pdf", "data": pdf("one two three")}}),
    ("/v1/messages", {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "one two three"}}),
    ("/v1/messages", {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "one two three"}]}}),
    ("/v1/chat/completions", {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{pdf('one two three')}"}}),
    ("/v1/responses", {"type": "input_file", "filename": "a.txt", "file_data": base64.b64encode(b"one two three").decode()}),
]  # fmt: skip


class TestDocuments:
    """Their text goes to the model."""

    @pytest.mark.parametrize(("path", "part"), DOCUMENTS)
    def test_is_read(self, site, path, part):
        def tokens(part):
            text = {**TEXT, "type": "input_text"} if path == "/v1/responses" else TEXT
            field = "input" if path == "/v1/responses" else "messages"
            told = site.post(path, json={"model": "blind", "max_tokens": 4, field: [user(text, *part)]})
            assert told.status_code == 200, told.text
            usage = told.json()["usage"]
            return usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)

        assert tokens([part]) >= tokens([]) + 3

    def test_a_large_one(self, site):
        """Of a large body, long texts are cut out before it is read."""
        part = {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": pdf("x" * 900_000)},
        }
        told = site.post("/v1/messages", json={"model": "blind", "max_tokens": 4, "messages": [user(part, TEXT)]})
        assert told.json()["error"]["message"].find("context") > 0, "its text is too long for the model"

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ({"type": "url", "url": "https://example.com/a.pdf"}, "send the document itself"),
            ({"type": "file", "file_id": "file_1"}, "send the document itself"),
            ({"type": "base64", "media_type": "application/pdf", "data": "!!"}, "no base64"),
            ({"type": "base64", "media_type": "application/pdf", "data": PNG}, "neither a PDF nor text"),
            ({"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(b"%PDF-1.4 nonsense").decode()}, "Could not process document"),
        ],
    )  # fmt: skip
    def test_one_that_is_none(self, site, source, said):
        part = {"type": "document", "source": source}
        told = site.post("/v1/messages", json={"model": "blind", "max_tokens": 4, "messages": [user(part)]})
        assert told.status_code == 400
        assert said in told.json()["error"]["message"]


def test_a_broken_document_in_an_earlier_turn_is_told(site):
    """Its conversation goes on."""
    part = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjQ="}}
    messages = [user(part, TEXT), EXTENSION_FIELDS, user(TEXT)]
    told = site.post("/v1/messages", json={"model": "blind", "max_tokens": 4, "messages": messages})
    assert told.status_code == 200, told.text


@pytest.mark.parametrize(("model", "sees"), [("blind", False), ("eyes", True)])
def test_what_a_model_sees_is_told(site, model, sees):
    told = site.get(f"/v1/models/{model}").json()
    assert ("image" in told["architecture"]["input_modalities"]) is sees
    assert ("vision" in site.post("/api/show", json={"model": model}).json()["capabilities"]) is sees
