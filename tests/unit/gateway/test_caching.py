"""What requests say about caches of prompts, and what becomes of it at each kind of worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.prompt_cache import NO_CACHE, PromptCache
from supervisor.core.types import ModelId
from supervisor.errors import InvalidRequestError
from supervisor.gateway.route import caching
from supervisor.gateway.route.caching import CacheDirective, CacheSalts, cache_directive_of
from supervisor.host.store.store import Store
from tests.support.cases import cases

CHAT = "/v1/chat/completions"
LLAMA = PromptCache(is_kept=True, paths=frozenset({CHAT}), reuse_field="cache_prompt")
VLLM = PromptCache(is_kept=True, paths=frozenset({CHAT}), salt_field="cache_salt")
MODEL = ModelId("m")


def told(cache_salts, wish, cache, path=CHAT, tenant="", theirs=None):
    return cache_salts.fields(wish, cache, path, MODEL, tenant, theirs)


class TestHeaders:
    """`X-Cache-Mode` and `X-Cache-Tag`, once each."""

    def test_none(self):
        assert cache_directive_of([(b"host", b"a"), (b"x-cache-control", b"none")]) is None

    @pytest.mark.parametrize("name", [b"x-tenant-id", b"x-priority"])
    def test_a_runners_other_headers_ask_for_an_answer(self, name):
        assert cache_directive_of([(name, b"a")]) == CacheDirective()

    def test_both(self):
        assert cache_directive_of([(b"x-cache-mode", b" None "), (b"x-cache-tag", b"a")]) == CacheDirective("none", "a")
        assert cache_directive_of([(b"x-cache-tag", b"a" * 64)]) == CacheDirective("auto", "a" * 64)
        assert cache_directive_of([(b"x-cache-mode", b"")]) == CacheDirective()

    @pytest.mark.parametrize(
        "headers",
        [
            [(b"x-cache-mode", b"yes")],
            [(b"x-cache-tag", b"a" * 65)],
            [(b"x-cache-tag", b"a\tb")],
            [(b"x-cache-tag", b"a"), (b"x-cache-tag", b"a")],
        ],
    )
    def test_refused(self, headers):
        with pytest.raises(InvalidRequestError):
            cache_directive_of(headers)


class TestFields:
    """What a worker can't be told is named."""

    def test_nothing_is_said(self):
        assert told(CacheSalts(), None, VLLM) == caching.NO_FIELDS

    @given(
        mode=st.sampled_from(["prefix", "none", "auto"]),
        tag=st.sampled_from(["", "a"]),
        cache=st.sampled_from([LLAMA, VLLM, NO_CACHE, None]),
        path=st.sampled_from([CHAT, "/v1/embeddings"]),
    )
    def test_each_header_has_an_effect_or_is_named(self, mode, tag, cache, path):
        found = told(CacheSalts(), CacheDirective(mode, tag), cache, path)
        separates = "cache_salt" in found.fields
        off = separates or found.fields.get("cache_prompt") is False or cache is NO_CACHE
        if mode == "none":
            assert off or "X-Cache-Mode" in found.ignored
        if mode == "prefix":
            has_effect = found.fields.get("cache_prompt") is True or (cache is VLLM and path == CHAT)
            assert has_effect is ("X-Cache-Mode" not in found.ignored)
        if tag:
            assert separates or (mode == "none" and off) or "X-Cache-Tag" in found.ignored
        assert not (found.fields and set(found.ignored) == {"X-Cache-Mode", "X-Cache-Tag"})


class TestSalts:
    """A flush changes the salts of those that it is about, and of nobody else."""

    @pytest.mark.parametrize(("kind", "name"), [("all", ""), ("model", "m"), ("tenant", "t"), ("tag", "g")])
    async def test_a_flush_changes_it(self, kind, name):
        cache_salts = CacheSalts()
        before = cache_salts.of(MODEL, "t", "g", None)
        await cache_salts.rotate(kind, name)
        after = cache_salts.of(MODEL, "t", "g", None)
        assert after != before
        assert after == cache_salts.of(MODEL, "t", "g", None)

    @pytest.mark.parametrize(("kind", "name"), [("model", "other"), ("tenant", "other"), ("tag", "other")])
    async def test_others_keep_theirs(self, kind, name):
        cache_salts = CacheSalts()
        before = cache_salts.of(MODEL, "t", "g", None)
        await cache_salts.rotate(kind, name)
        assert cache_salts.of(MODEL, "t", "g", None) == before
        assert cache_salts.of(MODEL, "t", "", None) is None

    def test_names_cannot_be_mixed_up(self):
        cache_salts = CacheSalts()
        assert cache_salts.of(MODEL, "ab", "c", None) != cache_salts.of(MODEL, "a", "bc", None)

    async def test_too_many_are_flushed_all_together(self, monkeypatch):
        monkeypatch.setattr(caching, "MOST_FLUSHED", 2)
        cache_salts = CacheSalts()
        await cache_salts.rotate("tenant", "a")
        kept = cache_salts.of(MODEL, "a", "", None)
        for name in "bcd":
            await cache_salts.rotate("tenant", name)
        assert cache_salts.of(MODEL, "a", "", None) not in {kept, None}

    async def test_outlive_a_restart(self, tmp_path):
        store = await Store.open(tmp_path / "state.sqlite3")
        cache_salts = CacheSalts()
        cache_salts.restore(store)
        await cache_salts.rotate("tenant", "a:b")
        told = cache_salts.of(MODEL, "a:b", "", None)
        await store.close()
        store = await Store.open(tmp_path / "state.sqlite3")
        again = CacheSalts()
        again.restore(store)
        await store.close()
        assert again.of(MODEL, "a:b", "", None) == told


class TestReuse:
    """Whether a worker can have used what it keeps."""

    @cases(
        ("mode", "cache", "reuses"),
        [
            ("prefix", NO_CACHE, False),
            ("auto", NO_CACHE, False),
            ("none", NO_CACHE, False),
            ("prefix", LLAMA, True),
            ("none", LLAMA, False),
            ("none", VLLM, False),
            ("none", None, True),
        ],
    )
    def test_by_runtime(self, mode, cache, reuses):
        found = CacheSalts().fields(CacheDirective(mode), cache, "/v1/chat/completions", "m", "", None)
        assert found.reuses is reuses
