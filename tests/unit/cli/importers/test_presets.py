"""Presets of llama-server's router: what they become, and what is told."""

from __future__ import annotations

from supervisor.cli.importers import presets
from tests.support.importing import ini


class TestPresets:
    """INI as llama.cpp reads it."""

    def test_sections(self):
        sections = presets.parse("version = 1\n[*]\r\nc = 1 ; no\n[ a b ] # yes\nm=x#y\n[a b]\nm = z\n")
        assert sections == {"": {"version": "1"}, "*": {"c": "1"}, "a b": {"m": "z"}}

    def test_own_goes_over_shared_whatever_its_spelling(self):
        draft = ini("[*]\nctx-size = 1\nno-kv-unified = true\n[a]\nm = /a.gguf\nLLAMA_ARG_CTX_SIZE = 2\nkvu = 1\n")
        assert draft.models == {"a": {"path": "/a.gguf", "n_ctx": 2, "kv_unified": True}}

    def test_aliases_are_names_for_clients(self):
        draft = ini("[a]\nm = /a.gguf\ntemp = 0\nalias = x, b,y\n[b]\nm = /b.gguf\nLLAMA_ARG_ALIAS = x\n")
        assert draft.virtual_models == {
            "a": {"model": "a", "defaults": {"temperature": 0}},
            "x": {"model": "a", "defaults": {"temperature": 0}},
            "y": {"model": "a", "defaults": {"temperature": 0}},
        }
        assert [model.get("alias") for model in draft.models.values()] == [None, None]
        lost = [note.message for note in draft.notes if note.lost]
        assert lost == ["b is the name of another model", "x is the name of another model"]

    def test_switches(self):
        draft = ini("[a]\nm = /a.gguf\nc = 0\nwarmup = false\nno-mmap = off\nembeddings = 0\nflash-attn = true\n")
        assert draft.models["a"] == {
            "path": "/a.gguf",
            "n_ctx": 0,
            "extra_args": ["--no-warmup", "--load-mode", "mmap"],
            "flash_attn": "on",
        }

    def test_times(self):
        draft = ini(
            "[a]\nm = /a.gguf\nsleep-idle-seconds = 60\nstop-timeout = 5\n[b]\nm = /b.gguf\nsleep-idle-seconds = -1\n"
        )
        assert draft.models == {
            "a": {"path": "/a.gguf", "keep_alive_s": 60, "grace_s": 5},
            "b": {"path": "/b.gguf"},
        }
        assert not any(note.lost for note in draft.notes)

    def test_a_time_that_is_none_is_told(self):
        draft = ini("[a]\nm = /a.gguf\nsleep-idle-seconds = 1m\nstop-timeout = ten\n")
        assert draft.models["a"] == {"path": "/a.gguf"}
        assert [(note.where, note.message) for note in draft.notes if note.lost] == [
            ("models.a.keep_alive_s", 'expected a number or "forever", got "1m"; write 60, in seconds'),
            ("models.a.grace_s", 'expected a number, got "ten"'),
        ]
