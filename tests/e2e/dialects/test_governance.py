"""Signed operations of the runner API against a running daemon: what carries them out, and every way to get around it."""

from __future__ import annotations

import base64
import hmac
import json
import secrets
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from supervisor.daemon.op_tokens import begin, to_text, with_signature
from tests.support.daemon import Daemon, fake, wait_until
from tests.support.limits import LIMIT_S
from tests.support.shell import llmux

KEYS = {name: f"the key of {name}, long enough".encode() for name in ("ann", "bob", "cid")}
SHARED = b"the key that all share, long enough"
ADMIN, USER = "sk-admin-0123456789abcdef", "sk-user-0123456789abcdef"
FIELDS = {"modelId": "one"}
ANNS = ("model-load", "--signer", "ann")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("governance")
    for name, key in {**KEYS, "shared": SHARED}.items():
        (folder / f"{name}.key").write_bytes(key + b"\n")
        (folder / f"{name}.key").chmod(0o600)
    (folder / "keys.yaml").write_text(
        f"- {{name: admin, key: {ADMIN}, scopes: [inference, admin]}}\n- {{name: user, key: {USER}}}\n"
    )
    (folder / "keys.yaml").chmod(0o600)
    return folder


def config(folder: Path, governance: dict[str, object]) -> dict[str, object]:
    return {
        "models": {"one": fake(), "two": fake()},
        "server": {"api_keys": str(folder / "keys.yaml"), "governance": governance},
    }


@pytest.fixture(scope="module")
def daemon(folder):
    """Two of three sign, each with a key of its own."""
    own = {name: str(folder / f"{name}.key") for name in KEYS}
    daemon = Daemon(folder, config(folder, {"required": 2, "signer_keys": own}))
    try:
        yield daemon.start()
    finally:
        daemon.stop()


def token(operation="model-unload", fields=FIELDS, signers=("ann", "bob"), now=None, changed=None) -> dict[str, object]:
    """A good one, unless `changed` says otherwise; that is signed, too."""
    made = begin(operation, fields, signers, now)
    made = {"opToken": {**made["opToken"], **(changed or {})}}
    for name in signers:
        made = with_signature(made, KEYS[name], name)
    return made


def send(daemon: Daemon, path: str, body: dict[str, object] | bytes, key: str = ADMIN) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return daemon.post(path, content=content, headers={"authorization": f"Bearer {key}"})


def unload(daemon: Daemon, made: object, **fields: object) -> httpx.Response:
    return send(daemon, "/v1/models/unload", {**FIELDS, **fields, "verifiedOpToken": made})


def refused(daemon: Daemon, told: httpx.Response) -> str:
    """The reason in the log; a client with a right key learns it, too."""
    assert told.status_code == 403, told.text
    reason = daemon.events("op_token.refused")[-1]["reason"]
    assert told.json() == {
        "error": {
            "code": "op_token_refused",
            "message": f"The operation token was refused: {reason}.",
            "param": "verifiedOpToken",
        }
    }
    return reason


class TestAccepted:
    """Enough signatures over this very operation."""

    def test_each_operation(self, daemon):
        for operation, path, fields in (
            ("model-load", "/v1/models/load", {"modelId": "one"}),
            ("cache-flush", "/v1/cache/flush", {"scope": "tenant", "tenantId": "müller"}),
            ("model-load", "/v1/models/load", {"modelId": "two", "evictModel": "one"}),
            ("model-unload", "/v1/models/unload", {"modelId": "two"}),
        ):
            made = to_text(token(operation, fields))
            told = send(daemon, path, {**fields, "verifiedOpToken": made})
            assert told.status_code in (200, 202), told.text
            assert "x-llmux-ignored" not in told.headers

    def test_as_an_object(self, daemon):
        assert unload(daemon, token()).status_code == 200

    def test_inference_and_reading_need_none(self, daemon):
        headers = {"authorization": f"Bearer {USER}"}
        wait_until(lambda: daemon.get("/v1/capabilities", headers=headers).status_code == 200, what="it has started")
        body = {"model": "one", "messages": [{"role": "user", "content": "Hello"}]}
        assert daemon.post("/v1/chat/completions", json=body, headers=headers).status_code == 200

    def test_the_scope_is_needed_besides(self, daemon):
        made = token()
        told = send(daemon, "/v1/models/unload", {**FIELDS, "verifiedOpToken": made}, key=USER)
        assert (told.status_code, told.json()["error"]["code"]) == (403, "insufficient_scope")
        assert unload(daemon, made).status_code == 200, "nothing of it was used up"


class TestAttacks:
    """Nothing else does anything."""

    @pytest.mark.parametrize("made", [None, "", "e30", "not base64!", {}, [], 7, {"opToken": {}}])
    def test_no_token(self, daemon, made):
        assert refused(daemon, unload(daemon, made))

    def test_replay(self, daemon):
        made = token()
        assert unload(daemon, made).status_code == 200
        assert refused(daemon, unload(daemon, made)) == "its nonce was used before"
        assert refused(daemon, unload(daemon, to_text(made))) == "its nonce was used before"

    def test_replay_in_another_form(self, daemon):
        """The same opToken with other blanks, order and padding is the same token."""
        made = token()
        assert unload(daemon, made).status_code == 200
        turned = {"opToken": dict(reversed(made["opToken"].items())), "signatures": made["signatures"]}
        text = base64.urlsafe_b64encode(json.dumps(turned, indent=3).encode()).decode()
        assert refused(daemon, unload(daemon, text)) == "its nonce was used before"

    def test_many_at_once_with_one_nonce(self, daemon):
        made = to_text(token())
        told: list[int] = []
        threads = [threading.Thread(target=lambda: told.append(unload(daemon, made).status_code)) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert sorted(told) == [200, *[403] * 11]

    def test_a_token_of_another_operation(self, daemon):
        reason = refused(daemon, unload(daemon, token("model-load")))
        assert reason == "it is for 'model-load', not for 'model-unload'"

    def test_swapped_fields(self, daemon):
        made = token("model-load", {"modelId": "one", "evictModel": "two"})
        body = {"modelId": "two", "evictModel": "one", "verifiedOpToken": made}
        assert "the request's is" in refused(daemon, send(daemon, "/v1/models/load", body))

    @pytest.mark.parametrize(
        "extra", [{"evictModel": "two"}, {"maxContextLength": 512}, {"gpuMemoryBudgetMB": 9000}, {"anything": 1}]
    )
    def test_a_field_more_in_the_request(self, daemon, extra):
        told = send(daemon, "/v1/models/load", {**FIELDS, **extra, "verifiedOpToken": token("model-load")})
        assert f"its {next(iter(extra))} is left out" in refused(daemon, told)

    def test_a_field_more_in_the_token(self, daemon):
        made = token("model-load", {**FIELDS, "evictModel": "two"})
        told = send(daemon, "/v1/models/load", {**FIELDS, "verifiedOpToken": made})
        assert "its evictModel is 'two', the request's is left out" in refused(daemon, told)

    def test_another_name_of_the_same_model(self, daemon):
        """What was agreed to is the text, not what it stands for."""
        assert "its modelId" in refused(daemon, unload(daemon, token(fields={"modelId": "One"})))

    @pytest.mark.parametrize(
        ("given", "twice"),
        [
            ('"scope": "a", "scope": "b"', "scope"),
            ('"verifiedOpToken": {"opToken": {"nonce": 1, "nonce": 2}}', "nonce"),
        ],
    )
    def test_a_key_twice_in_the_request(self, daemon, given, twice):
        """Whoever looked at the request before could have taken the other value for the one that counts."""
        told = send(daemon, "/v1/models/unload", f'{{"modelId": "one", {given}}}'.encode())
        error = told.json()["error"]
        assert (told.status_code, error["code"], error["param"]) == (400, "duplicate_key", twice)

    def test_a_key_twice_in_the_token(self, daemon):
        made = json.dumps(token()).encode()
        twice = made.replace(b'"modelId": "one"', b'"modelId": "one", "modelId": "two"')
        assert twice != made
        reason = refused(daemon, unload(daemon, base64.urlsafe_b64encode(twice).decode(), modelId="two"))
        assert reason == "the signature of 'ann', 'bob' is wrong"

    @pytest.mark.parametrize("issued_at", ["١٨٠٠٠٠٠٠٠٠", True, None, 1e308, -1e308, 2**63, 0])
    def test_times_that_are_none(self, daemon, issued_at):
        assert "issued" in refused(daemon, unload(daemon, token(changed={"issuedAt": issued_at})))

    @pytest.mark.parametrize("form", [str, lambda now: now * 1000, lambda now: [now]], ids=["text", "ms", "list"])
    def test_now_in_another_form(self, daemon, form):
        assert "issued" in refused(daemon, unload(daemon, token(changed={"issuedAt": form(int(time.time()))})))

    def test_half_a_second_is_a_time(self, daemon):
        assert unload(daemon, token(changed={"issuedAt": time.time() - 0.5})).status_code == 200

    @pytest.mark.parametrize("late", [-400, 400])
    def test_too_old_or_from_the_future(self, daemon, late):
        assert "issued" in refused(daemon, unload(daemon, token(now=time.time() + late)))

    def test_the_same_signer_twice(self, daemon):
        assert refused(daemon, unload(daemon, token(signers=("ann", "ann")))) == "1 signed, 2 must"
        made = token(changed={"signers": ["ann", "ann"]}, signers=("ann",))
        assert refused(daemon, unload(daemon, made)) == "1 signed, 2 must"

    def test_names_that_only_look_alike(self, daemon):
        made = token(changed={"signers": ["ann", "ａｎｎ"]}, signers=("ann",))
        assert "may not sign" in refused(daemon, unload(daemon, made))

    def test_one_signs_for_another(self, daemon):
        made = token(changed={"signers": ["ann", "bob"]}, signers=("ann",))
        made = {**made, "signatures": {**made["signatures"], "bob": made["signatures"]["ann"]}}
        assert refused(daemon, unload(daemon, made)) == "the signature of 'bob' is wrong"

    def test_a_signature_of_another_token(self, daemon):
        made = {**token(), "signatures": token()["signatures"]}
        assert refused(daemon, unload(daemon, made)) == "the signature of 'ann', 'bob' is wrong"

    def test_nested_without_end(self, daemon):
        deep = b'{"a":' * 995 + b"1" + b"}" * 995
        body = b'{"modelId": "one", "verifiedOpToken": {"opToken": {"signers": ["ann", "bob"], "x": %b}}}' % deep
        told = send(daemon, "/v1/models/unload", body)
        assert told.status_code in (400, 403), "refused, not broken"

    def test_half_a_character(self, daemon):
        body = b'{"modelId": "one", "verifiedOpToken": {"opToken": {"signers": ["ann", "bob"], "nonce": "\\ud800"}}}'
        assert send(daemon, "/v1/models/unload", body).status_code in (400, 403)

    def test_a_refused_operation_did_nothing(self, daemon):
        made = token("model-load")
        send(daemon, "/v1/models/load", {**FIELDS, "verifiedOpToken": made})
        headers = {"authorization": f"Bearer {ADMIN}"}
        state = daemon.get("/v1/admin/models/one", headers=headers).json()["state"]
        refused(daemon, unload(daemon, {**made, "signatures": {}}))
        assert daemon.get("/v1/admin/models/one", headers=headers).json()["state"] in {state, "ready"}


class TestRestart:
    """A nonce stays used."""

    def test_after_a_kill(self, folder, tmp_path):
        daemon = Daemon(tmp_path, config(folder, {"key_file": str(folder / "shared.key"), "signers": ["ann"]}))
        daemon.start()
        try:
            made = with_signature(begin("model-unload", FIELDS, ["ann"]), SHARED, None)
            assert unload(daemon, made).status_code == 200
            daemon.kill()
            daemon.start()
            assert refused(daemon, unload(daemon, made)) == "its nonce was used before"
        finally:
            daemon.stop()


def part(said: bytes) -> str:
    return base64.urlsafe_b64encode(said).rstrip(b"=").decode()


def jwt(alg: str = "HS256", secret: bytes = SHARED, **claims: object) -> str:
    """As another program makes one, by RFC 7515; whatever its header says, it is signed with HMAC-SHA256."""
    said = {
        "operation": "model-unload",
        "modelId": "one",
        "signers": ["ann", "bob"],
        "issuedAt": int(time.time()),
        "nonce": secrets.token_hex(12),
        **claims,
    }
    text = f"{part(json.dumps({'alg': alg, 'typ': 'JWT'}).encode())}.{part(json.dumps(said).encode())}"
    return f"{text}.{part(hmac.digest(secret, text.encode(), 'sha256'))}"


@pytest.fixture(scope="module")
def seeded(folder, tmp_path_factory):
    """Two sign with the key that all share, and no more than operation and model."""
    shared = {"key_file": str(folder / "shared.key"), "signers": ["ann", "bob"], "required": 2}
    daemon = Daemon(tmp_path_factory.mktemp("seed"), config(folder, {**shared, "signed_fields": "seed"}))
    try:
        yield daemon.start()
    finally:
        daemon.stop()


class TestSeed:
    """Tokens that sign operation and model only, and JWTs, with one shared key."""

    def test_a_jwt_once(self, seeded):
        made = jwt()
        assert unload(seeded, made).status_code == 200
        assert refused(seeded, unload(seeded, made)) == "its nonce was used before"

    @pytest.mark.parametrize("alg", ["none", "HS512", "RS256"])
    def test_another_algorithm(self, seeded, alg):
        assert refused(seeded, unload(seeded, jwt(alg))) == f"its algorithm is {alg!r}, and must be HS256"

    def test_the_rules_of_all_tokens(self, seeded):
        assert refused(seeded, unload(seeded, jwt(secret=b"another key, long enough"))) == "its signature is wrong"
        assert "it was issued" in refused(seeded, unload(seeded, jwt(issuedAt=int(time.time()) - 400)))
        assert refused(seeded, unload(seeded, jwt(exp=int(time.time()) - 1))) == "it has expired, by its exp"
        assert "it is for 'model-load'" in refused(seeded, unload(seeded, jwt(operation="model-load")))
        assert "its modelId is 'two'" in refused(seeded, unload(seeded, jwt(modelId="two")))
        assert refused(seeded, unload(seeded, jwt(signers=["ann"]))) == "1 signed, 2 must"

    def test_fields_that_are_not_signed(self, seeded):
        """Its context is the configuration's alone; that is looked at before."""
        more = {"evictModel": "two", "gpuMemoryBudgetMB": 9000}
        for made in (
            jwt(operation="model-load"),
            with_signature(begin("model-load", FIELDS, ["ann", "bob"]), SHARED, None),
        ):
            told = send(seeded, "/v1/models/load", {**FIELDS, **more, "verifiedOpToken": made})
            assert told.status_code in (200, 202), told.text

    def test_a_flush_of_everything(self, seeded):
        made = jwt(operation="cache-flush", modelId=None)
        told = send(seeded, "/v1/cache/flush", {"scope": "all", "verifiedOpToken": made})
        assert told.status_code == 200, told.text


class TestReason:
    """Why a token is refused is nobody's business but that of those who have a right key."""

    def test_without_keys_nobody_is_told(self, folder, tmp_path):
        made = config(folder, {"key_file": str(folder / "shared.key")})
        del made["server"]["api_keys"]
        daemon = Daemon(tmp_path, made)
        daemon.start()
        try:
            told = daemon.post("/v1/models/unload", json={**FIELDS, "verifiedOpToken": jwt("none")})
            assert told.status_code == 403
            assert told.json()["error"]["message"] == "The operation token was refused."
            assert "its algorithm" in daemon.events("op_token.refused")[-1]["reason"]
        finally:
            daemon.stop()

    def test_with_a_wrong_key(self, daemon):
        told = send(daemon, "/v1/models/unload", {**FIELDS, "verifiedOpToken": "e30"}, key="sk-wrong-0123456789abcdef")
        assert (told.status_code, told.json()["error"]["code"]) == (401, "invalid_api_key")


class TestKeyFile:
    """`key_file`, which a variable may name; without it nothing is allowed."""

    def test_by_the_variable_of_other_runners(self, folder, tmp_path):
        plain = config(folder, {})
        del plain["server"]["governance"]
        env = {"VERIFIED_OP_TOKEN_KEY_PATH": str(folder / "shared.key")}
        daemon = Daemon(tmp_path, plain, env=env)
        daemon.start()
        try:
            assert refused(daemon, send(daemon, "/v1/models/unload", FIELDS)) == "there is none"
            made = with_signature(begin("model-unload", FIELDS, ["anybody"]), SHARED, None)
            assert unload(daemon, made).status_code == 200
        finally:
            daemon.stop()

    def test_that_is_missing(self, folder, tmp_path):
        """By default it is /etc/safebox/model-api.key, which isn't there."""
        assert not Path("/etc/safebox/model-api.key").exists()
        daemon = Daemon(tmp_path, config(folder, {"required": 1}))
        daemon.start()
        try:
            made = with_signature(begin("model-unload", FIELDS, ["ann"]), SHARED, None)
            assert "/etc/safebox/model-api.key" in refused(daemon, unload(daemon, made))
        finally:
            daemon.stop()


class TestCommand:
    """`llmux token sign` makes what the daemon takes."""

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return llmux("token", "sign", *words, timeout=LIMIT_S)

    def test_two_sign_one_after_the_other(self, daemon, folder):
        both = ("--signer", "ann", "--signer", "bob")
        asked = ("model-unload", "-f", "modelId=one")
        first = self.run(*asked, *both, "--as", "ann", "--key", str(folder / "ann.key"))
        assert first.returncode == 0, first.stderr
        assert refused(daemon, unload(daemon, first.stdout.strip())) == "the signature of 'bob' is wrong"
        second = self.run("--token", first.stdout.strip(), "--as", "bob", "--key", str(folder / "bob.key"))
        assert second.returncode == 0, second.stderr
        assert unload(daemon, second.stdout.strip()).status_code == 200

    def test_as_json(self, folder):
        told = self.run(
            "cache-flush", "-f", "scope=all", "--signer", "ann", "--key", str(folder / "shared.key"), "--json"
        )
        made = json.loads(told.stdout)
        assert (made["opToken"]["operation"], made["opToken"]["scope"]) == ("cache-flush", "all")
        assert made == with_signature(made, SHARED, None)

    def test_numbers_are_numbers(self, folder):
        told = self.run(
            "model-load",
            "-f",
            "maxContextLength=4096",
            "-f",
            "modelId=one",
            "--signer",
            "ann",
            "--key",
            str(folder / "shared.key"),
            "--json",
        )
        assert json.loads(told.stdout)["opToken"]["maxContextLength"] == 4096

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ((), "Give an OPERATION"),
            (("model-load", "--token", "e30"), "Give an OPERATION"),
            (("model-burn",), "model-burn"),
            (("model-load", "-f", "modelId=a"), "Name each --signer"),
            ((*ANNS, "-f", "modelId"), "expected NAME=VALUE"),
            ((*ANNS, "-f", "modelId=a", "-f", "modelId=b"), "modelId is given twice"),
            ((*ANNS, "-f", "nonce=1"), "the token's own"),
            ((*ANNS, "-f", "x=NaN"), "not JSON compliant"),
            ((*ANNS, "--as", "eve"), "'eve' is not among the signers"),
            (("--token", "e30"), "the token has no opToken"),
        ],
    )
    def test_mistakes(self, folder, words, said):
        told = self.run(*words, "--key", str(folder / "shared.key"))
        assert told.returncode != 0
        assert said in told.stderr
        assert told.stdout == ""

    def test_the_default_key(self):
        told = self.run(*ANNS, "-f", "modelId=one")
        assert told.returncode != 0
        assert "/etc/safebox/model-api.key" in told.stderr

    def test_a_key_that_is_too_short(self, tmp_path):
        (tmp_path / "key").write_text("short")
        (tmp_path / "key").chmod(0o600)
        told = self.run(*ANNS, "--key", str(tmp_path / "key"))
        assert told.returncode != 0
        assert "at least 16 bytes" in told.stderr
