"""Somebody else on this machine changes the configuration or the keys: what others could write is refused."""

from __future__ import annotations

import grp
import json
import os
import stat
from pathlib import Path

import pytest

from supervisor.catalog.keys import load_keys
from supervisor.catalog.loading import ownership
from supervisor.catalog.loading.loader import load
from supervisor.catalog.sections.governance import read_key
from supervisor.errors import ConfigError
from tests.support.daemon import Daemon, fake, running, wait_until

KEYS = "- name: laptop\n  key_sha256: " + "0" * 64 + "\n"
ELSE = 4321  # a user and group that nobody has
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "llmux.yaml"
    path.write_text("server: {port: 1}\n")
    path.chmod(0o644)
    return path


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load(path)
    (line,) = refused.value.problems
    return line


class TestWritable:
    """Files, and the folders that lead to them."""

    @pytest.mark.parametrize("mode", [0o600, 0o644, 0o400])
    def test_what_only_the_owner_writes_is_read(self, config, mode):
        config.chmod(mode)
        assert load(config).server.port == 1

    def test_links_in_a_circle(self, tmp_path):
        (path := tmp_path / "keys.yaml").symlink_to(path)
        with pytest.raises(ConfigError, match="can't be read"):
            load_keys(path)

    def test_everybody(self, config):
        config.chmod(0o666)
        assert f"everybody on this machine can change {config} (mode 666); chmod go-w {config}" in problem(config)

    def test_the_remedy_helps(self, config):
        config.chmod(0o666)
        config.chmod(config.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
        assert load(config).server.port == 1

    def test_a_way_out(self, config, monkeypatch):
        """Some mounts show every file as writable."""
        config.chmod(0o666)
        assert problem(config).endswith(f"or set {ownership.ALLOW_VARIABLE}=1 to allow it")
        monkeypatch.setenv(ownership.ALLOW_VARIABLE, "1")
        assert load(config).server.port == 1

    def test_local_configuration(self, config):
        local = config.with_name("local.yaml")
        local.write_text("server: {port: 2}\n")
        local.chmod(0o646)
        assert f"can change {local}" in problem(config)

    def test_keys(self, tmp_path):
        path = tmp_path / "api_keys.yaml"
        path.write_text(KEYS)
        path.chmod(0o602)
        with pytest.raises(ConfigError, match="everybody on this machine can change"):
            load_keys(path)
        path.chmod(0o600)
        assert len(load_keys(path).keys) == 1

    def test_a_folder(self, tmp_path, config):
        tmp_path.chmod(0o777)
        assert f"can change {tmp_path} (mode 777)" in problem(config)
        tmp_path.chmod(0o1777)  # as /tmp
        assert load(config).server.port == 1

    def test_where_a_link_leads(self, tmp_path, config):
        (tmp_path / "open").mkdir()
        link = tmp_path / "link.yaml"
        link.symlink_to(config)
        assert load(link).server.port == 1
        real = config.rename(tmp_path / "open" / "real.yaml")
        (tmp_path / "open").chmod(0o777)
        link.unlink()
        link.symlink_to(real)
        assert f"can change {tmp_path / 'open'}" in problem(link)

    @as_root
    def test_the_groups_of_users(self, config):
        """The owner's own group may write; one of other users may not."""
        config.chmod(0o664)
        assert load(config).server.port == 1
        os.chown(config, 0, ELSE)
        assert load(config).server.port == 1, "nobody is in this group"
        os.chown(config, 0, 1)
        assert f"the group {grp.getgrgid(1).gr_name} can change" in problem(config)

    @as_root
    def test_somebody_elses_file(self, config):
        os.chown(config, ELSE, -1)
        assert f"{config} belongs to {ELSE}, who could change what llmux runs; chown it to root" in problem(config)


class TestSecrets:
    """Whoever can read the key that signs operations can sign them: it is for nobody else's eyes."""

    @pytest.fixture
    def key(self, tmp_path):
        path = tmp_path / "op.key"
        path.write_text("0123456789abcdef")
        path.chmod(0o600)
        return path

    @pytest.fixture(params=["key_file", "signer_keys"])
    def governed(self, request, config, key):
        keys = str(key) if request.param == "key_file" else {"ann": str(key)}
        config.write_text(json.dumps({"server": {"governance": {request.param: keys}}}))
        return config

    @pytest.mark.parametrize("mode", [0o600, 0o400])
    def test_what_only_the_owner_reads(self, governed, key, mode):
        key.chmod(mode)
        assert load(governed).server.governance is not None
        assert read_key(key) == b"0123456789abcdef"

    @pytest.mark.parametrize(("mode", "remedy"), [(0o604, "chmod o-r"), (0o602, "chmod go-w")])
    def test_everybody(self, governed, key, mode, remedy):
        key.chmod(mode)
        assert f"{key} (mode {mode:o}); {remedy} {key}" in problem(governed)
        with pytest.raises(ValueError, match=remedy):
            read_key(key)

    def test_one_that_is_not_there_is_no_mistake(self, governed, key):
        key.unlink()
        assert load(governed).server.governance is not None

    def test_a_way_out(self, governed, key, monkeypatch):
        key.chmod(0o644)
        monkeypatch.setenv(ownership.ALLOW_VARIABLE, "1")
        assert load(governed).server.governance is not None

    @as_root
    def test_groups(self, governed, key):
        key.chmod(0o640)
        os.chown(key, -1, ELSE)
        assert load(governed).server.governance is not None, "nobody is in this group"
        os.chown(key, -1, 1)
        assert f"the group {grp.getgrgid(1).gr_name} can read {key} (mode 640); chmod g-r {key}" in problem(governed)

    @as_root
    def test_somebody_elses(self, governed, key):
        os.chown(key, ELSE, -1)
        assert f"{key} belongs to {ELSE}" in problem(governed)


class TestDaemon:
    """It doesn't start with such files, and doesn't take them up."""

    def test_start(self, tmp_path):
        daemon = Daemon(tmp_path, {"models": {"plain": fake()}})
        daemon.config_path.touch()
        daemon.config_path.chmod(0o666)
        daemon.start(wait=False)
        assert daemon.process.wait(60) == 2
        assert f"chmod go-w {daemon.config_path}" in daemon.log_text()

    def test_reload(self, tmp_path):
        with running(tmp_path, {"models": {"plain": fake()}}) as daemon:
            daemon.config_path.write_text("models: {}\n")
            daemon.config_path.chmod(0o666)
            answer = daemon.post("/v1/admin/reload")
            assert answer.status_code == 400
            assert f"chmod go-w {daemon.config_path}" in answer.text
            wait_until(lambda: daemon.events("reload.refused"))
            assert daemon.chat("plain").status_code == 200
