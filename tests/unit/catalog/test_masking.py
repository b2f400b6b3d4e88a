"""What must not be shown, and what must not reach an operator's terminal."""

from __future__ import annotations

from supervisor.catalog.document.masking import MASK, masked
from tests.support.cases import cases


class TestMasks:
    """Secrets are known by what they are called, and by what they look like."""

    @cases(
        "name",
        ["OPENAI_API_KEY", "HF_TOKEN", "accessKey", "apikey", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD",
         "SSH_PASSPHRASE", "clientSecret", "GITHUB_PAT", "AUTHORIZATION"],
    )  # fmt: skip
    def test_names(self, name):
        assert masked({name: "value"}, "env") == {name: MASK}

    @cases("name", ["KEYBOARD", "TOKENIZERS_PARALLELISM", "MONKEY", "AUTHOR", "max_tokens", "PATH"])
    def test_other_names(self, name):
        assert masked({name: "value"}, "env") == {name: "value"}

    @cases(
        ("value", "shown"),
        [
            ("postgres://u:hunter2@h/db", f"postgres://u:{MASK}@h/db"),
            ("https://hunter2@h/x", f"https://{MASK}@h/x"),
            ("Authorization: Bearer hunter2.x-y", f"Authorization: Bearer {MASK}"),
            ("hf_abcdefghijklmnopqrstuvwxyz", MASK),
            ("sk-llmux-abcdefghijklmnopqrstuvwxyz", MASK),
            ("use ghp_abcdefghijklmnopqrstuvwxyz0123456789", f"use {MASK}"),
            ("https://h:8080/a@b", "https://h:8080/a@b"),
            ("/models/sk-1.gguf", "/models/sk-1.gguf"),
        ],
    )
    def test_values(self, value, shown):
        assert masked({"THING": value}, "env") == {"THING": shown}
        assert masked(["--thing", value], "cmd") == ["--thing", shown]
        assert masked(value, "note") == shown
