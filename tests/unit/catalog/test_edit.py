"""Models put into the text of a configuration, and taken out."""

from __future__ import annotations

import pytest
import yaml

from supervisor.catalog.document.edit import EditError, with_entries, with_keys, with_model, without_entry
from tests.support.cases import cases

ENTRY = {"source": {"repo": "acme/x-GGUF", "files": ["x-Q4_K_M.gguf"]}}
LINES = "  x:\n    source: {repo: acme/x-GGUF, files: [x-Q4_K_M.gguf]}\n"

WHOLE = """\
# all of mine
x-base: &base {cmd: [run], vram_mib: 1}  # shared
models:
  a: *base
  # the second
  b:
    <<: *base
    # vram_mib: 2
  # end of the models

# where
server: {port: 8081}
"""


class TestAdd:
    """All else stays, to the letter."""

    def test_behind_the_others(self):
        assert with_model(WHOLE, "x", ENTRY) == WHOLE.replace(
            "  # end of the models\n", f"  # end of the models\n{LINES}"
        )

    @cases(
        ("text", "wanted"),
        [
            ("", f"models:\n{LINES}"),
            ("# nothing yet", f"# nothing yet\n\nmodels:\n{LINES}"),
            ("server: {port: 1}\n", f"server: {{port: 1}}\n\nmodels:\n{LINES}"),
            ("models:\nserver: {port: 1}\n", f"models:\n{LINES}server: {{port: 1}}\n"),
            ("models:\n  #a:\n    #path: b\n\nserver: {}\n", f"models:\n  #a:\n    #path: b\n{LINES}\nserver: {{}}\n"),
            ("models: {}  # none\n", f"models: # none\n{LINES}"),
            ("models: ~\n", f"models:\n{LINES}"),
            ("models:\n  a: {cmd: [b]}", f"models:\n  a: {{cmd: [b]}}\n{LINES}"),
            ("models:\n  a:\n    cmd: |\n      b\n\n", f"models:\n  a:\n    cmd: |\n      b\n{LINES}\n"),
        ],
    )
    def test_wherever_models_stand(self, text, wanted):
        assert with_model(text, "x", ENTRY) == wanted

    @pytest.mark.parametrize("indent", [1, 4])
    def test_as_far_to_the_right_as_the_others(self, indent):
        text = f"models:\n{' ' * indent}a: {{cmd: [b]}}\n"
        assert f"\n{' ' * indent}x:\n" in with_model(text, "x", ENTRY)

    def test_line_ends(self):
        assert "\n" not in with_model("models:\r\n  a: {cmd: [b]}\r\n", "x", ENTRY).replace("\r\n", "")

    @cases(
        "text",
        [
            "models: {a: {cmd: [b]}}\n",
            "{models: {}}",
            "[1]",
            "models: {}\n...\n",
            "models: [1]\n",
            "x: &models {}\nmodels: *models\n",
            "models:\n  x: {cmd: [b]}\n",
            "models: {\n",
            "models:\n  a:\n    cmd: |\n      b\n      # a word\n  \n    # of the text\n" + "\t",
        ],
    )
    def test_what_is_not_sure_is_refused_with_the_lines(self, text):
        with pytest.raises(EditError) as refused:
            with_model(text, "x", ENTRY)
        assert "\n".join((*refused.value.detail, "")) == LINES

    @cases("name", ["on", "3", "a: b", "ümläut", "x#y", "'", "qwen3-0.6b:q4"])
    def test_any_name(self, name):
        assert name in yaml.load(with_model(WHOLE, name, ENTRY), yaml.BaseLoader)["models"]


class TestRemove:
    """All but the entry stays."""

    @pytest.mark.parametrize("text", [WHOLE, WHOLE.replace("\n", "\r\n"), "models:\n  a: {cmd: [b]}\n# end\n"])
    def test_what_was_added(self, text):
        assert without_entry(with_model(text, "x", ENTRY), "x") == text

    def test_with_the_comments_inside_of_it(self):
        assert without_entry(WHOLE, "b") == WHOLE.replace("  b:\n    <<: *base\n    # vram_mib: 2\n", "")
        assert without_entry(WHOLE, "a") == WHOLE.replace("  a: *base\n", "")

    def test_the_last_one(self):
        assert (
            without_entry("models:  # mine\n  # one\n  a: {cmd: [b]}\n# end\n", "a")
            == "models: {}  # mine\n  # one\n# end\n"
        )

    @cases(
        "text",
        [
            "models: {a: {cmd: [b]}, c: {cmd: [d]}}\n",
            "models:\n  a: &one {cmd: [b]}\n  c: *one\n",  # the other needs it
            "models:\n  c: {cmd: [d]}\n",
            "models:\n",
            "models: {\n",
        ],
    )
    def test_what_is_not_sure_is_refused(self, text):
        with pytest.raises(EditError, match="yourself"):
            without_entry(text, "a")


class TestKeys:
    """Only these keys change."""

    TEXT = "models:\n  a:\n    cmd: [b]  # run it\n    n: 1  # one\n    env:\n      X: y\n      # z\n  # next\n  c: {cmd: [d], n: 2}\n# end\n"

    @cases(
        ("name", "keys", "before", "after"),
        [
            ("a", {"n": 20}, "n: 1  # one", "n: 20  # one"),
            ("a", {"n": None}, "    n: 1  # one\n", ""),
            ("a", {"m": "x: y"}, "      # z\n", '      # z\n    m: "x: y"\n'),
            ("a", {"m": None}, "", ""),
            ("a", {"env": None}, "    env:\n      X: y\n      # z\n", ""),
            ("a", {"env": {"X": "no"}}, "    env:\n      X: y\n      # z\n", "    env: {X: no}\n"),
            ("a", {"cmd": ["e", "f"], "n": 3}, "cmd: [b]  # run it\n    n: 1", "cmd: [e, f]  # run it\n    n: 3"),
            ("c", {"n": 7}, "{cmd: [d], n: 2}", "{cmd: [d], n: 7}"),
            ("c", {"n": None}, "{cmd: [d], n: 2}", "{cmd: [d]}"),
            ("c", {"m": True}, "{cmd: [d], n: 2}", "{cmd: [d], n: 2, m: true}"),
        ],
    )
    @cases("end", ["\n", "\r\n"])
    def test_to_the_letter(self, name, keys, before, after, end):
        text, wanted = (each.replace("\n", end) for each in (self.TEXT, self.TEXT.replace(before, after, 1)))
        assert with_keys(text, name, keys) == wanted

    def test_of_the_last_line(self):
        assert with_keys("models:\n  a:\n    cmd: [b]", "a", {"n": 1}) == "models:\n  a:\n    cmd: [b]\n    n: 1\n"

    def test_over_what_is_inherited(self):
        assert with_keys(WHOLE, "b", {"vram_mib": 5}) == WHOLE.replace(
            "    # vram_mib: 2\n", "    # vram_mib: 2\n    vram_mib: 5\n"
        )

    def test_a_comment_in_the_middle_is_not_lost(self):
        text = "models:\n  a: {cmd: [b],\n    # mine\n    n: 1}\n"
        assert with_keys(text, "a", {"n": 2}) == text.replace("n: 1", "n: 2")
        with pytest.raises(EditError, match="yourself"):
            with_keys(text, "a", {"m": 2})

    @pytest.mark.parametrize("name", ["a", "nobody"])
    def test_that_others_share_is_refused_with_the_lines(self, name):
        with pytest.raises(EditError, match="yourself") as refused:
            with_keys(WHOLE, name, {"vram_mib": 5, "cmd": None})
        assert refused.value.detail == (f"  {name}:", "    vram_mib: 5")
        assert "Take out cmd" in refused.value.message

    def test_another_section(self):
        text = with_entries(WHOLE, {"x": {"model": "a"}}, "virtual_models")
        assert text == f"{WHOLE}\nvirtual_models:\n  x:\n    model: a\n"
        assert without_entry(text, "x", "virtual_models") == f"{WHOLE}\nvirtual_models: {{}}\n"
