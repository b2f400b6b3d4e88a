"""Operation tokens: what is accepted once, and what never is."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from supervisor.catalog.sections.governance import GovernanceConfig
from supervisor.daemon.op_tokens import (
    MOST_SPANS,
    VALID_S,
    OpTokens,
    RefusedError,
    begin,
    sign,
    to_text,
    verify,
    with_signature,
)
from supervisor.errors import ForbiddenError
from supervisor.host.store.store import Store
from tests.support.cases import cases

NOW = 4_000_000_000.0
YEAR_S = 365 * 24 * 3600.0
SHARED = GovernanceConfig(signers=("ann", "bob", "cid"), required=2)
EACH = GovernanceConfig(signer_keys={name: Path(name) for name in ("ann", "bob", "cid")}, required=2)
FIELDS = {"modelId": "chat", "maxContextLength": 4096, "evictModel": None}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def key(path):
    return f"the key of {path}, long enough".encode()


def shared(fields=FIELDS, signers=("ann", "bob"), operation="model-load", now=NOW):
    return with_signature(begin(operation, fields, signers, now), key(SHARED.key_file), None)


def check(token, config=SHARED, operation="model-load", fields=FIELDS, now=NOW):
    return verify(token, config, operation, fields, now, key)


def refusal(*args, **more):
    with pytest.raises(RefusedError) as refused:
        check(*args, **more)
    return str(refused.value)


def changed(token, **fields):
    """Somebody without the key writes other fields into it."""
    return {**token, "opToken": {**token["opToken"], **fields}}


class TestAccepted:
    def test_as_an_object_and_as_text(self):
        token = shared()
        texts = to_text(token), json.dumps(token)
        assert {check(token), *map(check, texts)} == {(token["opToken"]["nonce"], NOW + VALID_S)}

    def test_a_missing_field_is_as_null(self):
        assert check(shared({"modelId": "chat", "quantization": None}), fields={"modelId": "chat", "evictModel": None})

    @pytest.mark.parametrize("late", [-VALID_S, VALID_S])
    def test_within_five_minutes(self, late):
        assert check(shared(), now=NOW + late)

    def test_each_with_a_key_of_its_own(self):
        token = begin("model-load", FIELDS, ["ann", "bob"], NOW)
        for name in ("ann", "bob"):
            token = with_signature(token, key(name), name)
        assert check(to_text(token), EACH)

    @given(st.dictionaries(st.text(min_size=1, max_size=8), VALUES, max_size=4))
    def test_whatever_the_fields_are(self, fields):
        fields = {f"f{name}": value for name, value in fields.items()}
        assert check(to_text(shared(fields)), fields=fields)


class TestRefused:
    @pytest.mark.parametrize("late", [-VALID_S - 1, VALID_S + 1])
    def test_too_old_or_from_the_future(self, late):
        assert "issued" in refusal(shared(), now=NOW + late)

    def test_another_operation(self):
        assert "'model-load', not for 'model-unload'" in refusal(shared(), operation="model-unload")

    @cases(
        "fields",
        [
            {**FIELDS, "modelId": "other"},
            {**FIELDS, "maxContextLength": "4096"},
            {**FIELDS, "maxContextLength": True},
            {**FIELDS, "evictModel": "chat"},
            {"modelId": "chat"},
        ],
    )
    def test_another_request(self, fields):
        assert "the request's is" in refusal(shared(), fields=fields)

    @pytest.mark.parametrize(
        "fields", [{"modelId": "other"}, {"issuedAt": NOW + 1}, {"signers": ["ann", "cid"]}, {"nonce": "another one"}]
    )
    def test_changed_afterwards(self, fields):
        assert refusal(changed(shared(), **fields)) == "its signature is wrong"

    def test_too_few_signers(self):
        assert refusal(shared(signers=("ann", "ann"))) == "1 signed, 2 must"

    def test_a_stranger_among_the_signers(self):
        assert refusal(shared(signers=("ann", "bob", "eve"))) == "'eve' may not sign"

    def test_one_holder_of_a_key_can_not_sign_for_two(self):
        token = begin("model-load", FIELDS, ["ann", "bob"], NOW)
        token = with_signature(with_signature(token, key("ann"), "ann"), key("ann"), "bob")
        assert refusal(token, EACH) == "the signature of 'bob' is wrong"

    def test_keys_of_two_signers_that_are_the_same(self):
        token = begin("model-load", FIELDS, ["ann", "bob"], NOW)
        token = {**token, "signatures": dict.fromkeys(("ann", "bob"), sign(token["opToken"], b"one key for both"))}
        with pytest.raises(RefusedError, match="the same key"):
            verify(token, EACH, "model-load", FIELDS, NOW, lambda _: b"one key for both")

    def test_the_shared_key_is_no_signers_key(self):
        assert refusal(shared(), EACH) == "it has no signatures, one for each signer"

    @cases(
        "token",
        [None, "", "eyJ", "Zm9v", "é", "x" * 100_000, 1, [], {}, {"opToken": {}}, {"opToken": []}, {"signature": "00"}],
    )
    def test_no_token_at_all(self, token):
        assert refusal(token)

    @cases("signature", [None, "", "00", "é" * 64, 5, ["00"]])
    def test_no_signature(self, signature):
        assert refusal({**shared(), "signature": signature}) == "its signature is wrong"

    @pytest.mark.parametrize("nonce", ["short", "x" * 257, 12345678, None])
    def test_no_nonce(self, nonce):
        token = begin("model-load", FIELDS, ["ann", "bob"], NOW)
        token = with_signature(changed(token, nonce=nonce), key(SHARED.key_file), None)
        assert refusal(token).startswith("its nonce is not")

    @pytest.mark.parametrize("issued_at", [None, "now", True, []])
    def test_no_time(self, issued_at):
        token = with_signature(changed(shared(), issuedAt=issued_at), key(SHARED.key_file), None)
        assert refusal(token) == "issuedAt is not a time in seconds"

    @given(VALUES)
    def test_anything_else_is_refused_not_crashed(self, token):
        assert refusal(token)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "key").write_bytes(b"0123456789abcdef0123\n")
    (tmp_path / "key").chmod(0o600)
    return GovernanceConfig(key_file=tmp_path / "key", signers=("ann",))


def token_for(config, now=NOW):
    return to_text(
        with_signature(
            begin("model-unload", {"modelId": "m"}, ["ann"], now), config.key_file.read_bytes().strip(), None
        )
    )


async def ask(tokens, config, token, now=NOW):
    await tokens.check(config, token, "model-unload", {"modelId": "m"}, now)


async def refused(tokens, config, token, now=NOW):
    """What the log says, while the client is told nothing."""
    with capture_logs() as logs, pytest.raises(ForbiddenError) as error:
        await ask(tokens, config, token, now)
    assert (error.value.code, error.value.message) == ("op_token_refused", "The operation token was refused.")
    return logs[-1]["reason"]


def part(said):
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def jwt(claims, secret=None, header=None):
    """As other programs make one."""
    head = part({"alg": "HS256", "typ": "JWT"} if header is None else header)
    text = f"{head}.{part(claims)}"
    return f"{text}.{part(hmac.digest(secret or key(SHARED.key_file), text.encode(), 'sha256'))}"


CLAIMS = {
    "operation": "model-load",
    "modelId": "chat",
    "maxContextLength": 4096,
    "issuedAt": int(NOW),
    "signers": ["ann", "bob"],
    "nonce": "a nonce, long enough",
}


class TestJwt:
    """A JWT is held to the rules of every other token, and to HS256."""

    def test_its_claims_are_the_fields(self):
        assert check(jwt(CLAIMS)) == ("a nonce, long enough", NOW + VALID_S)

    def test_registered_claims(self):
        names = {"issuedAt": "iat", "nonce": "jti"}
        claims = {names.get(name, name): value for name, value in CLAIMS.items()}
        assert check(jwt({**claims, "exp": NOW + 1, "nbf": NOW})) == ("a nonce, long enough", NOW + VALID_S)
        assert check(jwt({**CLAIMS, "iat": 0})), "a library's own iat gives way to issuedAt"

    @cases("alg", ["none", "None", "HS384", "HS512", "RS256", "ES256", "hs256", "", None, 1, ["HS256"]])
    def test_other_algorithms(self, alg):
        assert "its algorithm is" in refusal(jwt(CLAIMS, header={"alg": alg, "typ": "JWT"}))

    def test_none_without_a_signature(self):
        assert "its algorithm is 'none'" in refusal(f"{part({'alg': 'none'})}.{part(CLAIMS)}.")

    def test_hs256_without_a_signature(self):
        assert refusal(f"{part({'alg': 'HS256'})}.{part(CLAIMS)}.") == "its signature is wrong"

    def test_an_extension_that_must_be_understood(self):
        assert "crit" in refusal(jwt(CLAIMS, header={"alg": "HS256", "crit": ["b64"], "b64": False}))

    @cases("text", ["..", "a.b.c", "é.é.é", f"{part([])}.{part({})}.", f"{part({'alg': 'HS256'})}.W10."])
    def test_what_only_looks_like_one(self, text):
        assert "it looks like a JWT" in refusal(text)

    def test_claims_of_somebody_else(self):
        head, _, signature = jwt(CLAIMS).split(".")
        assert refusal(f"{head}.{part({**CLAIMS, 'modelId': 'other'})}.{signature}") == "its signature is wrong"
        assert refusal(jwt(CLAIMS, b"another key, long enough")) == "its signature is wrong"

    @cases(
        ("changed", "said"),
        [
            ({"operation": "model-unload"}, "it is for 'model-unload'"),
            ({"modelId": "other"}, "its modelId is 'other'"),
            ({"maxContextLength": None}, "its maxContextLength is left out"),
            ({"evictModel": "other"}, "its evictModel is 'other'"),
            ({"aud": "others"}, "its aud is 'others'"),
            ({"issuedAt": NOW - VALID_S - 1}, "it was issued 301 s ago"),
            ({"issuedAt": "now"}, "issuedAt is not a time"),
            ({"nonce": "short"}, "its nonce is not"),
            ({"nonce": None}, "its nonce is not"),
            ({"signers": ["ann"]}, "1 signed, 2 must"),
            ({"signers": ["ann", "eve"]}, "'eve' may not sign"),
            ({"signers": None}, "signers is not a list"),
            ({"exp": NOW}, "it has expired"),
            ({"exp": "never"}, "exp is not a time"),
            ({"nbf": NOW + 1}, "it is not good yet"),
        ],
    )
    def test_the_same_rules(self, changed, said):
        assert said in refusal(jwt({**CLAIMS, **changed}))

    def test_where_each_has_a_key(self):
        one = GovernanceConfig(signer_keys=EACH.signer_keys)
        claims = {**CLAIMS, "signers": ["ann"]}
        assert check(jwt(claims, key("ann")), one)
        assert refusal(jwt(claims, key("bob")), one) == "its signature is wrong"
        assert "a JWT has one signature" in refusal(jwt(CLAIMS, key("ann")), EACH)


class TestSignedFields:
    """With `seed`, a token need not say more than operation and model."""

    SEED = SHARED.model_copy(update={"signed_fields": "seed"})

    def test_operation_and_model_are_enough(self):
        for token in (shared({"modelId": "chat"}), jwt({**CLAIMS, "maxContextLength": None})):
            assert check(token, self.SEED)
            assert "its maxContextLength is left out" in refusal(token), "by default"

    def test_both_must_be_said(self):
        assert "its modelId is left out" in refusal(shared({}), self.SEED)
        assert "its modelId is 'other'" in refusal(shared({"modelId": "other"}), self.SEED)
        assert "it is for" in refusal(shared({"modelId": "chat"}, operation="model-unload"), self.SEED)

    def test_what_is_said_besides_still_counts(self):
        assert "its maxContextLength is 8192" in refusal(shared({**FIELDS, "maxContextLength": 8192}), self.SEED)

    def test_of_no_model(self):
        flush = {"scope": "all", "modelId": None}
        assert check(shared({}, operation="cache-flush"), self.SEED, "cache-flush", flush)
        assert "its modelId" in refusal(
            shared({"modelId": "chat"}, operation="cache-flush"), self.SEED, "cache-flush", flush
        )


class TestOnce:
    async def test_not_twice(self, config):
        tokens, token = OpTokens(), token_for(config)
        await ask(tokens, config, token)
        assert await refused(tokens, config, token) == "its nonce was used before"

    async def test_of_two_at_once_one_is_carried_out(self, config, tmp_path):
        store = await Store.open(tmp_path / "state")
        tokens, token = OpTokens(store), token_for(config)
        found = await asyncio.gather(*(ask(tokens, config, token) for _ in range(5)), return_exceptions=True)
        assert sorted(map(str, found)) == ["None", *["The operation token was refused."] * 4]
        await store.close()

    async def test_not_after_a_restart_either(self, config, tmp_path):
        token = token_for(config)
        store = await Store.open(tmp_path / "state")
        await ask(OpTokens(store), config, token)
        await store.close()
        store = await Store.open(tmp_path / "state")
        assert await refused(OpTokens(store), config, token) == "its nonce was used before"
        await store.close()

    async def test_nonces_are_forgotten_when_their_tokens_are_no_longer_good(self, config, tmp_path):
        store = await Store.open(tmp_path / "state")
        tokens = OpTokens(store)
        for minute in range(0, 60, 6):
            now = NOW + 60 * minute
            await ask(tokens, config, token_for(config, now), now)
        assert len(store.items("op_nonces")) == len(tokens._used) == 1
        await store.close()

    async def test_nor_when_the_clock_went_wrong_in_between(self, config, tmp_path):
        """Whatever is signed at the right time is good again at once."""
        store = await Store.open(tmp_path / "state")
        used = token_for(config)
        await ask(OpTokens(store), config, used)
        for hours in (0, 1, 2):  # it is a year ahead, and its nonces are forgotten, too
            now = NOW + YEAR_S + 3600 * hours
            await ask(OpTokens(store), config, token_for(config, now), now)
        await store.close()
        store = await Store.open(tmp_path / "state")
        assert await refused(OpTokens(store), config, used) == "it is as old as tokens whose nonces are forgotten"
        await ask(OpTokens(store), config, token_for(config, NOW + 1), NOW + 1)
        assert len(store.items("op_nonces")) == 2, "and of the wrong year one that may still be good then"
        await store.close()

    @given(
        st.lists(st.tuples(st.sampled_from([0, 100, 700, 5000, YEAR_S, 2 * YEAR_S]), st.integers(0, 20)), max_size=60)
    )
    def test_whatever_the_clock_says(self, moves):
        """Of two days, one is a whole year off; and all that was forgotten is a few numbers."""

        async def use():
            tokens, done, drift = OpTokens(), set(), 0.0
            for moved, number in moves:
                drift += 7
                now = NOW + moved + drift
                nonce = f"number {number}", now
                for each in {nonce, *done}:  # whoever listened sends everything again
                    with contextlib.suppress(RefusedError):
                        if abs(each[1] - now) <= VALID_S:  # as `verify` has it
                            await tokens._use_nonce(str(each), each[1] + VALID_S, now)
                            assert each not in done
                            done.add(each)
                assert len(tokens._forgotten) <= MOST_SPANS

        asyncio.run(use())

    async def test_a_steady_clock_refuses_no_new_token(self):
        tokens, now = OpTokens(), NOW
        for number in range(200):
            now += (number * 37 % 400) + 1
            await tokens._use_nonce(f"number {number}", now - 250 + VALID_S, now)
        assert len(tokens._forgotten) <= MOST_SPANS

    @pytest.mark.parametrize("lost", ["removed", "damaged", "all of it"])
    async def test_nor_when_the_state_was_lost(self, config, tmp_path, lost):
        """Then nobody knows what was used before; also after the next start."""
        path, before = tmp_path / "state", time.time() - 10
        store = await Store.open(path)
        unused = token_for(config, before)
        assert "issued before the state" in await refused(OpTokens(store), config, unused, before + 10)
        await store.close()
        if lost == "damaged":
            path.write_bytes(b"damaged" * 1000)
        else:
            path.unlink()
        if lost == "all of it":
            path.with_name("state.backup").unlink()
        for _ in range(2):
            store = await Store.open(path)
            now = store.began + 1
            assert "issued before the state" in await refused(OpTokens(store), config, unused, now)
            assert "issued before the state" in await refused(OpTokens(store), config, token_for(config, now - 3), now)
            await ask(OpTokens(store), config, token_for(config, now), now)
            await store.close()

    async def test_without_a_key_file_nothing_is_allowed(self, config):
        token = token_for(config)
        config.key_file.unlink()
        assert "No such file" in await refused(OpTokens(), config, token)

    async def test_a_token_nested_too_deeply_is_refused_not_a_bug(self, config):
        deep = {}
        for _ in range(5000):
            deep = {"a": deep}
        assert await refused(OpTokens(), config, {"opToken": {"signers": ["ann"], "x": deep}, "signature": "00"})

    async def test_without_governance_everything_is(self):
        await OpTokens().check(None, None, "model-unload", {}, NOW)


class TestConfiguration:
    @pytest.mark.parametrize(
        ("keys", "said"),
        [
            ({"required": 2, "signers": ("ann",)}, "there are 1 signers"),
            ({"signer_keys": {"ann": Path("a"), "bob": Path("a")}}, "the same file"),
            ({"signer_keys": {"ann": Path("a")}, "signers": ("bob",)}, "different signers"),
        ],
    )
    def test_that_promises_less_than_it_says(self, keys, said):
        with pytest.raises(ValueError, match=said):
            GovernanceConfig(**keys)

    def test_the_default_key(self):
        assert GovernanceConfig().key_file == Path("/etc/safebox/model-api.key")
