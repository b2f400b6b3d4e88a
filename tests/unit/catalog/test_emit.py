from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from supervisor.catalog.document.document import Layer, Source, parse, plain
from supervisor.catalog.document.yaml_writer import Comments, to_yaml

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**15), 10**15)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.sampled_from(["on", "null", "1e3", "0x10", "~", "- a", "a: b", "a #b", "007", "--port", "${port}", "a,b"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT.filter(lambda key: key not in {"", "<<"}), inner),
    max_leaves=12,
)


def read(text: str) -> object:
    node, problems = parse(text, Source(Layer.FILE, "written", Path("/")))
    assert problems == []
    return plain(node) if node is not None else {}


class TestWritten:
    """What is written reads back as what was given."""

    @given(st.dictionaries(st.sampled_from(["models", "x-1", "server"]), VALUES))
    def test_reads_back(self, document):
        assert read(to_yaml(document)) == document

    def test_looks(self):
        document = {"models": {"a": {"path": "/m/a.gguf", "cmd": ["x", "--port", "${port}"], "env": {"A": "1"}}}}
        comments = Comments(above={("models", "a"): ["About a."]}, beside={("models", "a", "path"): "here"})
        assert to_yaml(document, comments) == (
            "models:\n"
            "  # About a.\n"
            "  a:\n"
            "    path: /m/a.gguf  # here\n"
            '    cmd: [x, "--port", "${port}"]\n'
            '    env: {A: "1"}\n'
        )
