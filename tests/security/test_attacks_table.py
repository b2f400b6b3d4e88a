"""Which tests show what becomes of each known attack."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support.cases import cases

ROOT: Final = Path(__file__).parents[2]

TABLE: Final[Mapping[str, tuple[str, ...]]] = {
    "exposed_daemon": (
        "tests/security/test_exposure.py::TestExposure::test_refuses_to_start_on_another_address",
        "tests/e2e/daemon/test_reload.py::TestKeys::test_the_last_key_of_an_open_address_stays",
        "tests/faults/test_reload.py::TestALostFile::test_no_keys",
        "tests/installation/test_service.py::TestSocketActivation::test_that_others_reach_is_refused_without_keys",
        "tests/installation/test_service.py::TestSocketActivation::test_neither_reload_nor_upgrade_takes_its_last_key",
        "tests/installation/test_service.py::TestInstall::test_a_socket_that_others_reach_needs_keys",
    ),
    "dns_rebinding": (
        "tests/security/test_exposure.py::TestHost::test_refused",
        "tests/security/test_exposure.py::TestOrigin::test_strangers",
        "tests/security/test_pages.py::TestCrossSite::test_is_refused",
        "tests/security/test_attacks.py::TestPaths::test_no_address_but_the_exact_one",
    ),
    "path_tricks": (
        "tests/security/test_exposure.py::TestPaths::test_never_reaches_a_worker",
        "tests/security/test_exposure.py::TestPaths::test_an_escaped_path_is_the_path",
        "tests/security/test_auth.py::TestScopes::test_admin_by_another_spelling",
        "tests/security/test_auth.py::TestScopes::test_a_line_break_opens_nothing",
        "tests/security/test_attacks.py::TestPaths::test_no_address_but_the_exact_one",
        "tests/security/test_bodies.py::TestAddresses::test_controls_are_refused",
    ),
    "unknown_routes": (
        "tests/security/test_auth.py::TestCredentials::test_refused",
        "tests/unit/server/test_app.py::TestErrors::test_of_an_unknown_path",
    ),
    "two_credentials": (
        "tests/security/test_auth.py::TestCredentials::test_two_different_ones",
        "tests/security/test_auth.py::TestCredentials::test_accepted",
    ),
    "key_guessing": (
        "tests/security/test_auth.py::TestCredentials::test_refused",
        "tests/unit/catalog/test_keys.py::TestAuthenticate::test_new_key",
        "tests/unit/catalog/test_keys.py::TestAuthenticate::test_plain_and_hashed",
        "tests/unit/catalog/test_keys.py::TestFile::test_all_problems",
        "tests/security/test_fuzz_files.py::TestConfiguration::test_keys",
    ),
    "scopes": (
        "tests/security/test_auth.py::TestScopes::test_inference",
        "tests/security/test_auth.py::TestScopes::test_admin",
    ),
    "expired_keys": ("tests/unit/catalog/test_keys.py::TestAuthenticate::test_expiry",),
    "revoked_keys": (
        "tests/faults/test_reload.py::TestARevokedKey::test_though_the_reload_is_refused",
        "tests/faults/test_reload.py::TestARevokedKey::test_the_last_one_opens_nothing",
        "tests/unit/catalog/test_keys.py::TestWithoutRevoked::test_what_is_gone_is_revoked",
    ),
    "upstream_of_the_clients_choice": (
        "tests/security/test_exposure.py::TestPaths::test_a_body_can_not_choose_the_upstream",
    ),
    "redirects": (
        "tests/security/test_attacks.py::TestRedirects::test_are_not_followed",
        "tests/e2e/remote/test_requests.py::TestErrors::test_redirects_are_not_followed",
    ),
    "media_references": (
        "tests/security/test_media.py",
        "tests/e2e/http/test_media.py",
        "tests/unit/gateway/test_media.py",
    ),
    "media_that_is_loaded": (
        "tests/security/test_media_loading.py",
        "tests/unit/gateway/test_media_address.py",
        "tests/unit/gateway/test_media_loading.py",
        "tests/unit/host/test_media.py",
        "tests/e2e/http/test_media_loading.py",
    ),
    "routes_of_workers": (
        "tests/security/test_exposure.py::TestPaths::test_llama_servers_own_management",
        "tests/security/test_attacks.py::TestPaths::test_routes_of_workers",
    ),
    "port_of_a_worker": (
        "tests/security/test_auth.py::TestWorkers::test_its_port_is_no_way_around",
        "tests/security/test_auth.py::TestWorkers::test_llama_servers_port_is_none_either",
        "tests/security/test_attacks.py::TestSecrets::test_the_port_asks_for_it",
        "tests/security/test_attacks.py::TestSecrets::test_argv_and_cores",
        "tests/faults/host/test_process.py::TestSpawn::test_keys_are_in_no_argv_and_not_in_the_shim",
    ),
    "smuggling": (
        "tests/security/test_exposure.py::TestSmuggling::test_refused",
        "tests/security/test_exposure.py::TestSmuggling::test_a_rest_is_no_request",
        "tests/security/test_attacks.py::TestSmuggling::test_refused",
        "tests/security/test_attacks.py::TestSmuggling::test_fields_of_one_connection_end_with_it",
        "tests/security/test_bodies.py::TestTrailers::test_are_ignored",
        "tests/unit/server/test_protocol.py::TestRefusals::test_refused",
    ),
    "body_bombs": (
        "tests/security/test_loop_stalls.py",
        "tests/security/test_fuzz_bodies.py",
        "tests/security/test_slow_and_many.py::TestManyLargeBodies",
        "tests/faults/test_bodies_memory.py",
        "tests/security/test_bodies.py::TestReadAnotherWay::test_refused",
        "tests/security/test_bodies.py::TestTheRestOfARefusedBody::test_is_not_read_without_bound",
        "tests/e2e/http/test_errors.py",
        "tests/e2e/http/test_multipart.py",
    ),
    "names_of_models": (
        "tests/security/test_attacks.py::TestNames::test_only_looked_up",
        "tests/security/test_bodies.py::TestNames::test_a_long_one_is_refused",
    ),
    "yaml_tricks": (
        "tests/security/test_fuzz_files.py::TestConfiguration::test_bombs",
        "tests/security/test_fuzz_files.py::TestConfiguration::test_a_damaged_one",
        "tests/unit/catalog/test_document.py::TestRefusals::test_problem",
        "tests/security/test_attacks.py::TestSupply::test_no_shell_and_no_unsafe_loader",
    ),
    "damaged_model_files": (
        "tests/security/test_fuzz_files.py::TestGguf::test_a_damaged_one",
        "tests/security/test_fuzz_files.py::TestGguf::test_a_huge_file_that_is_all_header",
        "tests/security/test_fuzz_files.py::TestGguf::test_a_file_that_shrinks_meanwhile",
        "tests/security/test_fuzz_files.py::TestCheckpoints::test_weights",
    ),
    "secrets_into_workers": (
        "tests/security/test_attacks.py::TestSecrets::test_environment",
        "tests/security/test_auth.py::TestWorkers::test_no_credential_reaches_it",
        "tests/e2e/remote/test_operations.py::TestSecrets::test_not_in_the_environment_of_workers",
    ),
    "core_dumps": (
        "tests/security/test_attacks.py::TestSecrets::test_argv_and_cores",
        "tests/faults/host/test_process.py::TestSpawn::test_dumps_no_core_and_reads_nothing",
    ),
    "code_of_models": ("tests/security/test_attacks.py::TestSupply::test_code_of_models_is_off",),
    "client_keys_to_remotes": ("tests/e2e/remote/test_requests.py::TestIdentity::test_only_our_key_is_sent",),
    "state_changes_by_get": ("tests/security/test_attacks.py::TestStateChanges::test_by_another_method",),
    "cors_on_admin": (
        "tests/security/test_exposure.py::TestOrigin::test_allowed_for_inference_only",
        "tests/security/test_exposure.py::TestOrigin::test_preflight",
    ),
    "secrets_in_logs": (
        "tests/security/test_attacks.py::TestLogs::test_have_nothing_of_a_request",
        "tests/security/test_auth.py::TestWorkers::test_the_log_names_the_key_and_does_not_tell_it",
    ),
    "log_lines_of_workers": ("tests/security/test_worker_logs.py",),
    "files_that_others_can_change": ("tests/security/test_file_permissions.py",),
    "slow_clients": (
        "tests/security/test_slow_and_many.py::TestSlowReaders",
        "tests/faults/test_slow_reader_drain.py",
    ),
    "forged_log_lines": (
        "tests/security/test_attacks.py::TestLogs::test_no_line_is_forged",
        "tests/security/test_names.py::TestTerminals::test_the_log_has_no_names_with_controls",
    ),
    "supply_chain": ("tests/security/test_attacks.py::TestSupply::test_every_lock_pins_by_hash",),
}
"""Attack → its tests: `path::Class::test`, or a whole file."""

NOT_YET: Final = frozenset({"replayed_signed_operations", "images_that_llmux_fetches"})
"""Attacks on what there isn't: signed operations, and references that llmux itself would follow."""


class TestTable:
    """Every test that it names is there."""

    @cases("test", sorted({test for tests in TABLE.values() for test in tests}))
    def test_names_what_there_is(self, test):
        path, *names = test.split("::")
        node: ast.AST = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for name in names:
            inner = {child.name: child for child in ast.iter_child_nodes(node) if hasattr(child, "name")}
            assert name in inner, f"{path} has no {name}"
            node = inner[name]

    def test_has_no_attack_without_a_test(self):
        assert all(TABLE.values())
        assert not NOT_YET & TABLE.keys()
