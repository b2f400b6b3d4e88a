from __future__ import annotations

import hashlib
from datetime import UTC, datetime

import pytest

from supervisor.catalog.keys import Keyring, Scope, load_keys, local_key, new_key, refuse_exposed, without_revoked
from supervisor.errors import ConfigError
from tests.support.cases import cases

PLAIN = "sk-open-webui-0123456789"
DIGEST = hashlib.sha256(b"another secret").hexdigest()


def keyring(folder, text, mode=0o600):
    path = folder.write(text, "api_keys.yaml")
    path.chmod(mode)
    return load_keys(path)


class TestAuthenticate:
    """A credential is a key, or nothing."""

    def test_plain_and_hashed(self, folder):
        ring = keyring(
            folder,
            f"""\
- name: webui
  key: {PLAIN}
- name: ops
  key_sha256: {DIGEST}
  scopes: [admin, metrics]
- {{name: prefixed, key: "sha256:{hashlib.sha256(b"third").hexdigest()}"}}
""",
        )
        assert ("webui", {Scope.INFERENCE}) == (ring.authenticate(PLAIN, 0).name, ring.authenticate(PLAIN, 0).scopes)
        assert {Scope.ADMIN, Scope.METRICS} == ring.authenticate(b"another secret", 0).scopes
        assert ring.authenticate("third", 0).name == "prefixed"
        for stranger in ("", PLAIN[:-1], PLAIN + "x", DIGEST, f"sha256:{DIGEST}", "é", "\udcff", b"\xff"):
            assert None is ring.authenticate(stranger, 0)

    def test_expiry(self, folder):
        ring = keyring(folder, f"- {{name: a, key: {PLAIN}, expires: 2030-01-31}}")
        end = datetime(2030, 1, 31, tzinfo=UTC).timestamp()
        assert ring.authenticate(PLAIN, end - 1).name == "a"
        assert None is ring.authenticate(PLAIN, end)

    def test_new_key(self, folder):
        secret, entry = new_key("ops", [Scope.ADMIN], "2999-01-01T00:00:00Z")
        assert secret.startswith("sk-llmux-")
        assert len(secret) - len("sk-llmux-") >= 43
        assert secret not in str(entry)
        ring = keyring(folder, f"- {entry}", mode=0o644)
        assert (ring.authenticate(secret, 0).name, ring.warnings) == ("ops", ())
        assert secret != new_key("ops")[0]


class TestDemand:
    """How urgent a key's requests are, and for whom they come."""

    def test_fields(self, folder):
        more = "priority: low, priority_ceiling: normal, tenant: chat, for_others: true"
        plain, full = keyring(folder, f"- {{name: a, key: {PLAIN}}}\n- {{name: b, key: {PLAIN}b, {more}}}").keys
        assert (plain.priority, plain.priority_ceiling, plain.tenant, plain.for_others) == (None, 0, "", False)
        assert (full.priority, full.priority_ceiling, full.tenant, full.for_others) == (80, 50, "chat", True)

    @pytest.mark.parametrize(
        ("more", "told"),
        [
            ("priority: urgent", "priority"),
            ("priority: 101", "priority"),
            ("priority_ceiling: true", "priority_ceiling"),
            ("priority: high, priority_ceiling: normal", "more urgent"),
            ("priority: 49, priority_ceiling: normal", "more urgent"),
            (f"tenant: {'x' * 65}", "tenant"),
            ('tenant: "a\\tb"', "printed"),
            ("for_others: 1", "for_others"),
        ],
    )
    def test_mistakes(self, folder, more, told):
        with pytest.raises(ConfigError, match=told):
            keyring(folder, f"- {{name: a, key: {PLAIN}, {more}}}")


class TestFile:
    """Read as strictly as the configuration; no secret appears in a problem."""

    @pytest.mark.parametrize("text", ["", "[]", "keys:", "keys: []"])
    def test_empty(self, folder, text):
        assert not keyring(folder, text)

    def test_all_problems(self, folder):
        text = f"""\
keys:
  - {{name: a, key: {PLAIN}}}
  - {{name: a, key: {PLAIN}}}
  - {{name: b, key: short}}
  - {{name: c}}
  - {{name: d, key: 1234567890123456789, scope: [admin]}}
  - {{name: e, key_sha256: abc}}
  - {{name: f, key: {PLAIN}x, scopes: [root]}}
  - {{name: g, key: {PLAIN}y, expires: tomorrow}}
  - text
  - {{name: h, key: {PLAIN}z, scopes: []}}
more: 1
"""
        with pytest.raises(ConfigError) as caught:
            keyring(folder, text)
        problems = [line.removeprefix(f"{folder.path}/") for line in caught.value.problems]
        assert problems == [
            'api_keys.yaml:3:5 keys[1]: a second key named "a"',
            'api_keys.yaml:3:5 keys[1]: the same key as "a"',
            "api_keys.yaml:4:5 keys[2]: the key is shorter than 16 characters and could be guessed",
            'api_keys.yaml:5:5 keys[3]: a key is given by either "key" or "key_sha256"',
            "api_keys.yaml:6:15 keys[4].key: expected text",
            'api_keys.yaml:6:41 keys[4].scope: unknown key; did you mean "scopes"?',
            "api_keys.yaml:7:5 keys[5]: a SHA-256 digest has 64 hexadecimal digits",
            'api_keys.yaml:8:56 keys[6].scopes[0]: expected "inference", "admin", "metrics" or "configure"',
            (
                'api_keys.yaml:9:5 keys[7]: "expires" must be a date or time such as 2030-01-31 or '
                '2030-01-31T12:00:00Z, got "tomorrow"'
            ),
            "api_keys.yaml:10:5 keys[8]: expected a mapping",
            "api_keys.yaml:11:5 keys[9]: a key without scopes opens nothing",
            'api_keys.yaml:12:1 more: unknown key; there is only "keys"',
        ]
        assert PLAIN not in str(caught.value)
        assert "1234567890123456789" not in str(caught.value)

    def test_load_feedback(self, folder):
        told, silent = keyring(
            folder, f"- {{name: a, key: {PLAIN}, load_feedback: true}}\n- {{name: b, key_sha256: {'0' * 64}}}"
        ).keys
        assert (told.load_feedback, silent.load_feedback) == (True, None)

    def test_whose_requests_for_responses(self, folder):
        pools, silent = keyring(
            folder, f"- {{name: a, key: {PLAIN}, responses: llm-pool}}\n- {{name: b, key_sha256: {'0' * 64}}}"
        ).keys
        assert (pools.responses, silent.responses) == ("llm-pool", None)

    def test_readable_by_others(self, folder):
        assert keyring(folder, f"- {{name: a, key: {PLAIN}}}").warnings == ()
        (warning,) = keyring(folder, f"- {{name: a, key: {PLAIN}}}", mode=0o640).warnings
        assert "mode 640" in warning
        assert "(a)" in warning
        assert keyring(folder, f"- {{name: a, key_sha256: {DIGEST}}}", mode=0o644).warnings == ()


class TestIds:
    """What a key leaves behind is its own: a later key of the same name has another id, unless it replaced it."""

    def test_of_the_secret_and_not_of_the_name(self, folder):
        (one,) = keyring(folder, f"[{{name: a, key: {PLAIN}}}]").keys
        (renamed,) = keyring(folder, f"[{{name: b, key: {PLAIN}}}]").keys
        (other,) = keyring(folder, f"[{{name: a, key: {PLAIN}x}}]").keys
        (heir,) = keyring(folder, f"[{{name: a, key: {PLAIN}x, id: {one.id}}}]").keys
        assert one.id == renamed.id == heir.id != other.id
        assert local_key("one").id == local_key("two").id

    def test_mistakes(self, folder):
        (one,) = keyring(folder, f"[{{name: a, key: {PLAIN}}}]").keys
        for entries, told in (
            (f"{{name: {one.id}, key: {PLAIN}}}", "could be the id of a key"),
            (f"{{name: a, key: {PLAIN}, id: ann}}", "id"),
            (f'{{name: a, key: {PLAIN}, id: "(local)"}}', "id"),
            (f"{{name: a, key: {PLAIN}}}, {{name: b, key: {PLAIN}x, id: {one.id}}}", 'the same id as "a"'),
            ("{name: a, key: <put-your-own-key-here>}", "placeholder"),
        ):
            with pytest.raises(ConfigError, match=told):
                keyring(folder, f"[{entries}]")


class TestExposure:
    """Without keys only this machine is served."""

    @cases("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"])
    def test_loopback(self, host):
        assert None is refuse_exposed(host, Keyring())

    @pytest.mark.parametrize(
        "host", ["0.0.0.0", "::", "192.168.1.2", "example.org", "localhost.example.org", "::ffff:10.0.0.1", "0", ""]
    )
    def test_exposed(self, folder, host):
        assert f"server.host is {host}" in refuse_exposed(host, Keyring())
        assert None is refuse_exposed(host, keyring(folder, f"- {{name: a, key: {PLAIN}}}"))


class TestWithoutRevoked:
    """Of a file that can't take effect as a whole, only what it takes away counts."""

    OTHER = "sk-other-0123456789"
    BOTH = f"""\
- {{name: a, key: {PLAIN}, scopes: [inference, admin]}}
- {{name: b, key: {OTHER}}}
"""

    def left(self, folder, text):
        running = keyring(folder, self.BOTH)
        path = folder.write(text, "api_keys.yaml")
        path.chmod(0o600)
        left = without_revoked(running, path)
        assert left, "requests still need a key"
        assert [key.name for key in left.keys] == ["a", "b"]
        return left

    @pytest.mark.parametrize("text", ["", "keys:\n", "- {name: a, key: [", "text", BOTH, "keys: 3"])
    def test_a_file_that_is_lost_or_damaged_takes_nothing(self, folder, text):
        assert keyring(folder, self.BOTH) == self.left(folder, text)

    @pytest.mark.parametrize("text", [f"- {{name: b, key: {OTHER}}}", f"keys: [{{name: renamed, key: {OTHER}}}]"])
    def test_what_is_gone_is_revoked(self, folder, text):
        left = self.left(folder, text)
        assert (left.authenticate(PLAIN, 1), left.authenticate(self.OTHER, 1).name) == (None, "b")

    def test_an_empty_list_revokes_all(self, folder):
        left = self.left(folder, "keys: []  # none")
        assert (left.authenticate(PLAIN, 1), left.authenticate(self.OTHER, 1)) == (None, None)

    def test_an_entry_with_mistakes_revokes_nothing(self, folder):
        left = self.left(folder, "- {name: a, key: short}")
        assert (left.authenticate(PLAIN, 1).name, left.authenticate(self.OTHER, 1)) == ("a", None)

    def test_what_it_may_do_for_others_and_before_them_only_shrinks(self, folder):
        before = keyring(folder, f"- {{name: a, key: {PLAIN}, for_others: true, priority_ceiling: normal}}")
        path = folder.write(f"- {{name: a, key: {PLAIN}, priority_ceiling: low}}", "api_keys.yaml")
        (key,) = without_revoked(before, path).keys
        assert (key.for_others, key.priority_ceiling) == (False, 80)
        path = folder.write(f"- {{name: a, key: {PLAIN}, for_others: true}}", "api_keys.yaml")
        (key,) = without_revoked(before, path).keys
        assert (key.for_others, key.priority_ceiling) == (True, 50)

    def test_scopes_and_expiry_only_shrink(self, folder):
        text = (
            f"- {{name: a, key: {PLAIN}, scopes: [admin, metrics], expires: 2030-01-01}}\n- {{name: c, key: {DIGEST}}}"
        )
        left = self.left(folder, text)
        assert left.authenticate(PLAIN, 1).scopes == {Scope.ADMIN}
        assert left.authenticate(PLAIN, datetime(2031, 1, 1, tzinfo=UTC).timestamp()) is None
        assert left.authenticate(DIGEST, 1) is None
