from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.registry import REGISTRY
from supervisor.catalog.document.document import (
    Layer,
    Place,
    Source,
    dotted,
    merge,
    parse,
    places,
    plain,
    read,
    scalar,
    tree_of,
)
from tests.support.cases import cases

SOURCE = Source(Layer.FILE, "a.yaml", Path("/etc"))


def tree(text):
    node, problems = parse(text, SOURCE)
    assert problems == []
    return node


def problems(text):
    return [str(problem) for problem in parse(text, SOURCE)[1]]


class TestScalars:
    """Plain words mean what YAML 1.2's core schema says, and nothing more."""

    @cases(
        ("text", "value"),
        [
            ("true", True),
            ("False", False),
            ("no", "no"),
            ("on", "on"),
            ("~", None),
            ("", None),
            ("12", 12),
            ("-3", -3),
            ("0x10", 16),
            ("0o17", 15),
            ("017", "017"),
            ("00.5", "00.5"),
            ("1.5", 1.5),
            ("1e3", 1000.0),
            (".5", 0.5),
            ("12:30", "12:30"),
            ("1_000", "1_000"),
            ("2030-01-31", "2030-01-31"),
            ("9" * 5000, "9" * 5000),
            (".inf", ".inf"),
            ("1.2.3", "1.2.3"),
        ],
    )
    def test_meaning(self, text, value):
        assert (value, type(value)) == (scalar(text), type(scalar(text)))

    def test_quoted_is_text_and_keys_are_text(self):
        assert plain(tree("1: 'true'\nno: \"2\"")) == {"1": "true", "no": "2"}


class TestPlaces:
    """Every value knows the place of its key."""

    def test_places(self):
        node = tree("models:\n  qwen:\n    n_ctx: 1\n    list: [7, 8]\n")
        assert {dotted(trail): str(place) for trail, place in places(node).items()} == {
            "": "a.yaml:1:1",
            "models": "a.yaml:1:1",
            "models.qwen": "a.yaml:2:3",
            "models.qwen.n_ctx": "a.yaml:3:5",
            "models.qwen.list": "a.yaml:4:5",
            "models.qwen.list[0]": "a.yaml:4:12",
            "models.qwen.list[1]": "a.yaml:4:15",
        }


class TestAliases:
    """Anchors work, merges keep the nearer value, expansion is bounded."""

    def test_merge_key(self):
        text = "x-a: &a {n: 1, m: 1}\nx-b: &b {n: 2, k: 2}\nc:\n  <<: [*a, *b]\n  m: 3\n"
        assert plain(tree(text))["c"] == {"n": 1, "m": 3, "k": 2}

    def test_bomb(self):
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
        assert problems("\n".join(lines)) == ["a.yaml:5:30 a4[4]: more than 50000 values, aliases expanded"]

    def test_self_reference(self):
        assert problems("a: &a [*a]") == ["a.yaml:1:8 a[0]: *a stands for nothing that is complete at this point"]


class TestRefusals:
    """What YAML allows and a configuration doesn't need is a problem with a place."""

    @cases(
        ("text", "problem"),
        [
            ("a: 1\nb: 2\na: 3", 'a.yaml:3:1: duplicate key "a"; it is already there in line 1'),
            ("a: !!python/object/apply:os.system [x]", "a.yaml:1:4 a: the tag tag:yaml.org,2002:python/object/apply:os.system has no meaning here"),
            ("a: !!str 5", "a.yaml:1:4 a: the tag tag:yaml.org,2002:str has no meaning here"),
            ("? [a]\n: 1", "a.yaml:1:3: a key must be text"),
            ("a: 1\n---\nb: 2", "a.yaml:2:1: a second document begins; one file holds one"),
            ("a: [1\nb: }", "a.yaml:2:2: not valid YAML: did not find expected ',' or ']', while parsing a flow sequence"),
            ("a: *b", "a.yaml:1:4 a: *b stands for nothing that is complete at this point"),
            ("<<: 1", "a.yaml:1:5: << takes a mapping or a list of mappings"),
            ("a: \x01", "a.yaml: not valid YAML: unacceptable character #x0001: control characters are not allowed"),
        ],
    )  # fmt: skip
    def test_problem(self, text, problem):
        assert problem in problems(text)

    def test_depth_without_recursion(self):
        found = problems("a: " + "[" * 100_000)
        assert len(found) == 1
        assert "nested more than 32 deep" in found[0]

    def test_size_encoding_and_absence(self, tmp_path):
        large, latin = tmp_path / "large", tmp_path / "latin"
        large.write_bytes(b"#" * (1 << 20) + b"#")
        latin.write_bytes(b"a: 1\nb: \xe9\n")
        assert self._read(large) == (None, ["a.yaml: larger than 1 MiB"])
        assert self._read(latin) == (None, ["a.yaml:2:1: not UTF-8 text"])
        assert self._read(tmp_path / "none") == (None, ["a.yaml: can't be read: No such file or directory"])

    def _read(self, path):
        node, found = read(path, SOURCE)
        return node, [str(problem) for problem in found]

    @given(st.text(alphabet=st.sampled_from("ab:-[]{}&*<>!|'\"# \n,?%@"), max_size=60))
    def test_any_text_gives_a_tree_or_problems(self, text):
        node, found = parse(text, SOURCE)
        if not found:
            assert node is None or places(node)
        assert all("\n" not in str(problem) for problem in found)


class TestMerge:
    """Later layers win key by key; lists and scalars are replaced whole; null takes a key back."""

    def test_merge(self):
        base, over = tree("a: {b: 1, c: [1, 2], d: {e: 1}}"), tree("a: {b: 2, c: [3], d: null, f: ~}")
        assert plain(merge(base, over)) == {"a": {"b": 2, "c": [3], "f": None}}

    def test_grown_values(self):
        node = tree_of({"a": (1, Path("/x")), "b": None}, Place(SOURCE))
        assert plain(node) == {"a": [1, "/x"], "b": None}
        with pytest.raises(TypeError):
            tree_of(object(), Place(SOURCE))


class TestCharactersThatOnlyLookRight:
    """Tabs, curly quotes and blanks of word processors are named, with their line and column."""

    @cases(
        ("text", "told"),
        [
            ("models:\n\ta: 1\n", "a.yaml:2:1: a tab indents this line, and YAML takes only spaces there"),
            ("a:\n  b: 1\n \tc: 2\n", "a.yaml:3:2: a tab indents this line, and YAML takes only spaces there"),
            ("a:\n  b: “x y”\n", "a.yaml:2:6 a.b: “ is a curly quote"),
            ("“a”: 1\n", "a.yaml:1:1: “ is a curly quote"),
            ("a: [x, ‘y’]\n", "a.yaml:1:8 a[1]: ‘ is a curly quote"),
            ('a: "abc”\nb: 1\n', "a.yaml:1:8: ” is a curly quote"),
            ("a:\n  b:\u00a0/x\n", "a.yaml:2:5 a: a non-breaking space (U+00A0)"),
            ("a:\n\u00a0 b: 1\n", "a.yaml:2:1: a non-breaking space (U+00A0)"),
            ("a: 1\nb:\n  c: x\n\u00a0 d: 1\n", "a.yaml:4:1: a non-breaking space (U+00A0)"),
        ],
    )
    def test_named(self, text, told):
        assert any(problem.startswith(told) for problem in problems(text)), problems(text)

    @cases("text", ['a: "“x” 10\u00a0€"\n', "a: It’s mine\n", "a: |\n  “x”\n", "a: [1,\n\t2]\n", "# “\u00a0\n"])
    def test_meant(self, text):
        assert problems(text) == []

    def test_in_a_command(self, folder):
        (problem,) = folder.problems("models:\n  m:\n    cmd: |\n      cat\u00a0-m ${port}\n", registry=REGISTRY)
        assert problem.startswith("llmux.yaml:3:5 models.m.cmd: a non-breaking space (U+00A0) joins")
