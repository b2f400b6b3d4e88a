"""Settings that operators change while the daemon runs."""

from __future__ import annotations

import pytest

from supervisor.daemon.configuration.runtime_config import VARIABLE, RuntimeConfig, from_environment
from supervisor.errors import ConfigError
from supervisor.host.store.store import NotSavedError, Store


class TestVariable:
    """It says what holds at first."""

    @pytest.mark.parametrize(
        ("text", "allowed"), [(None, True), ("", True), ("true", True), ("FALSE", False), ("0", False), (" no ", False)]
    )
    def test_words(self, monkeypatch, text, allowed):
        monkeypatch.delenv(VARIABLE, raising=False)
        if text is not None:
            monkeypatch.setenv(VARIABLE, text)
        assert from_environment() is allowed

    def test_anything_else_is_a_mistake(self, monkeypatch):
        monkeypatch.setenv(VARIABLE, "maybe")
        with pytest.raises(ConfigError, match="expected true or false, got 'maybe'"):
            from_environment()


class TestRuntimeConfig:
    """What an operator said counts, and is kept where there is a store."""

    async def test_without_a_store(self):
        config = RuntimeConfig(allow_cloud_fallback=False)
        assert not config.allow_cloud_fallback
        await config.allow(cloud_fallback=True)
        assert config.allow_cloud_fallback

    async def test_a_store_keeps_it(self, tmp_path):
        store = await Store.open(tmp_path / "state.sqlite3")
        await RuntimeConfig(store).allow(cloud_fallback=False)
        await store.close()
        store = await Store.open(tmp_path / "state.sqlite3")
        assert not RuntimeConfig(store, allow_cloud_fallback=True).allow_cloud_fallback
        await store.close()

    async def test_what_cannot_be_kept_is_not_changed(self, tmp_path):
        store = await Store.open(tmp_path / "state.sqlite3")
        config = RuntimeConfig(store)
        await store.close()
        with pytest.raises(NotSavedError):
            await config.allow(cloud_fallback=False)
        assert config.allow_cloud_fallback
