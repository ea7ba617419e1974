"""Attacks on a secured node, each with the tests that make it: who adds a test to an attack names
it here, and who renames one is told.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).resolve().parents[2]


class Attack(NamedTuple):
    """``tests`` are ``file::name``; ``open`` says what is not tested or not prevented, and why."""

    what: str
    tests: tuple[str, ...]
    open: str = ""


SASL = "node/kafka/test_sasl_handshake.py::"
FLOOD = "node/kafka/test_sasl_attacks.py::"
SCRAM = "client/security/test_scram.py::"
TLS = "node/wire/test_tls.py::"
DOORS = "node/kafka/test_tls_listeners.py::"
CUTS = "node/wire/test_tls_cuts.py::"
RELOAD = "node/security/test_tls_reload.py::"
NODES = "node/internode/test_strangers.py::"
PAIR = "node/security/test_two_nodes.py::"
BEFORE = "node/security/test_before_login.py::"
MATRIX = "node/security/test_negative_matrix.py::"
WIRE = "node/security/test_bytes_on_the_wire.py::"
GRPC = "node/security/test_grpc_access.py::"
TAKEN = "node/security/test_attacks.py::"
ACLS = "cluster/security/test_acl_index.py::"
HTTP = "node/http/test_server.py::"
QUOTAS = "node/wire/test_client_quotas.py::"
BEARER = "node/kafka/test_oauthbearer.py::"
TOKENS = "node/security/oauth/test_token_verifier.py::"
KEYS = "node/security/oauth/test_json_web_keys.py::"
SOURCE = "node/security/oauth/test_key_source.py::"
FETCH = "node/security/oauth/test_https_get.py::"
USAGE = "node/security/test_client_usage.py::"
FIRST = "node/config/test_bootstrap_scram.py::"

ATTACKS = {
    1: Attack(
        "requests on a SASL listener before a login, by the ten thousand",
        (
            f"{SASL}test_whoever_does_not_log_in_is_closed_unparsed",
            f"{SASL}test_what_strangers_send_draws_on_a_budget_of_their_own",
            f"{BEFORE}test_every_api_before_a_login_is_closed_unanswered",
            f"{BEFORE}test_every_route_wants_a_login_that_is_not_over",
            f"{FLOOD}test_ten_thousand_strangers_leave_nothing",
        ),
    ),
    2: Attack(
        "a frame that is too large, one byte a second, half a ClientHello",
        (
            f"{FLOOD}test_ten_thousand_strangers_leave_nothing",
            f"{SASL}test_a_login_that_takes_too_long_is_closed_though_bytes_trickle",
            f"{TLS}test_half_a_hello_and_one_that_does_not_go_on_are_gone_in_time",
        ),
    ),
    3: Attack(
        "handshakes that are begun and left, or reset, by the thousand",
        (
            f"{TLS}test_handshakes_that_are_left_or_reset_keep_nobody_out",
            f"{DOORS}test_thousands_of_handshakes_cost_the_requests_of_others_little",
            f"{DOORS}test_however_many_handshakes_begin_others_have_their_turn_after_a_few",
            f"{DOORS}test_handshakes_at_a_time_are_bounded_by_their_setting",
        ),
        "times are processor time of the node's thread: others wait for nothing else",
    ),
    4: Attack(
        "SCRAM: another nonce, header, proof, count of iterations, server",
        (
            f"{SCRAM}test_a_first_message_that_is_refused",
            f"{SCRAM}test_a_last_message_that_is_refused",
            f"{SCRAM}test_the_header_of_the_last_message_is_that_of_the_first",
            f"{SCRAM}test_the_proof_of_another_mechanism_is_refused",
            f"{SCRAM}test_a_challenge_that_our_client_refuses",
            f"{SCRAM}test_our_client_refuses_a_server_that_does_not_know_the_user",
        ),
    ),
    5: Attack(
        "an unknown user against a wrong password",
        (
            f"{FLOOD}test_an_unknown_user_is_answered_as_a_wrong_password_is",
            f"{SCRAM}test_an_unknown_user_fails_at_the_end_as_a_wrong_password_does",
            "node/security/test_stored_credentials.py::"
            "test_what_users_know_of_themselves_says_nothing_of_what_others_are_shown",
            f"{PAIR}test_both_tell_an_unknown_user_the_same",
        ),
        "of times it is asserted that they overlap, and of work that it is the same",
    ),
    6: Attack(
        "wrong passwords by the ten thousand from one address",
        (
            f"{FLOOD}test_a_flood_of_wrong_passwords_keeps_no_other_address_out",
            f"{HTTP}test_wrong_passwords_keep_nobody_out",
            "node/security/test_password_checks.py::"
            "test_an_address_that_floods_keeps_nobody_else_waiting",
            "node/security/test_password_checks.py::"
            "test_ten_thousand_wrong_passwords_come_before_nobody_else",
            "node/security/test_password_checks.py::"
            "test_among_ten_thousand_wrong_passwords_a_right_one_waits_for_little_work",
        ),
        "times are processor time of the whole node, its threads that check passwords included",
    ),
    7: Attack(
        "PLAIN with two or four fields, without a password, for another, with NULs",
        ("client/security/test_plain_and_jaas.py::test_a_message_that_is_refused",),
    ),
    8: Attack(
        "tokens (JWT)",
        (
            f"{TOKENS}test_tokens_that_are_refused",
            f"{TOKENS}test_claims_that_are_refused",
            f"{TOKENS}test_a_header_that_says_where_a_key_is_means_nothing",
            f"{KEYS}test_what_is_no_key_set_is_refused",
            f"{FETCH}test_what_is_refused",
            f"{FETCH}test_an_answer_that_never_comes_or_ends_early_is_given_up",
            f"{SOURCE}test_unknown_keys_cause_a_fetch_now_and_then",
            f"{BEARER}test_a_huge_token_is_refused_before_it_is_read",
        ),
    ),
    9: Attack(
        "logging in again as another, otherwise, too often; requests after the end of a session",
        (
            f"{SASL}test_who_logs_in_again_as_another_or_otherwise_is_closed",
            f"{BEARER}test_a_renewal_that_is_not_right_is_refused_and_closes",
            f"{SASL}test_a_session_ends_unless_its_client_logs_in_again",
            f"{SASL}test_a_fetch_that_waits_outlives_its_session",
            f"{WIRE}test_a_session_that_is_over_is_served_nothing_but_a_login",
            f"{GRPC}test_a_session_that_is_over_calls_nothing",
            f"{BEARER}test_a_stream_of_http_ends_with_its_login",
        ),
    ),
    10: Attack(
        "certificates: expired, early, another's, with names that imitate; none where it is wanted",
        (
            f"{TLS}test_whose_certificate_is_believed",
            "client/security/test_tls.py::test_who_is_not_believed",
            "client/security/test_distinguished_names.py::test_a_name_is_written_as_java_writes_it",
            "failover/test_tls_between_nodes.py::"
            "test_who_is_no_node_says_nothing_on_the_listener_between_nodes",
        ),
    ),
    11: Attack(
        "old versions, weak suites, renegotiation, tickets of before a reload, truncation",
        (
            f"{TLS}test_versions_and_suites_with_openssl",
            f"{TLS}test_nobody_renegotiates_and_no_tickets_are_given",
            f"{CUTS}test_a_ticket_from_before_a_reload_opens_nothing_new",
            f"{CUTS}test_a_response_that_is_cut_is_no_response",
            f"{CUTS}test_a_client_that_cuts_leaves_nothing",
        ),
    ),
    12: Attack(
        "another protocol than was named, TLS where it is not spoken and the other way",
        (
            f"{TLS}test_who_names_a_protocol_speaks_it",
            f"{DOORS}test_who_names_a_protocol_of_http_speaks_no_kafka",
            f"{TLS}test_grpc_is_known_by_its_first_bytes_where_no_protocol_is_named",
            f"{TLS}test_what_does_not_begin_a_handshake_is_closed",
            f"{TLS}test_http_without_tls_is_told_of_https",
            f"{TLS}test_tls_where_it_is_not_spoken",
        ),
    ),
    13: Attack(
        "rotation: halves, another authority, what cannot be used, under load",
        (
            f"{RELOAD}test_half_of_a_rotation_is_not_taken",
            f"{RELOAD}test_what_cannot_be_used_leaves_the_old_one_in_force",
            f"{RELOAD}test_another_authority_together_with_the_key",
            f"{CUTS}test_connections_of_before_a_reload_go_on",
            "failover/test_tls_between_nodes.py::test_certificates_are_replaced_under_load",
            f"{PAIR}test_connections_of_before_a_reload_go_on_and_later_ones_show_the_new_"
            "certificates",
        ),
    ),
    14: Attack(
        "a client that says it is a replica",
        (
            "node/wire/test_strangers.py::test_a_client_is_no_replica",
            "node/wire/test_strangers.py::"
            "test_forged_fetches_acknowledge_nothing_and_lock_nobody_out",
            f"{TAKEN}test_who_calls_himself_a_replica_learns_no_more_of_where_epochs_end",
        ),
    ),
    15: Attack(
        "another user's fetch session",
        (
            "node/kafka/test_fetch_sessions.py::"
            "test_a_session_belongs_to_the_principal_that_opened_it",
        ),
    ),
    16: Attack(
        "rights and credentials taken away meanwhile",
        (
            f"{TAKEN}test_what_is_taken_is_gone_at_once",
            f"{TAKEN}test_a_stream_of_events_ends_with_the_right_to_it",
            f"{TAKEN}test_who_may_not_describe_the_cluster_is_told_of_what_he_may",
            "node/security/test_passwords_at_the_front.py::"
            "test_grpc_asks_who_calls_and_ends_a_stream_with_the_right_to_it",
            f"{GRPC}test_a_stream_ends_with_the_credential_of_its_user",
            f"{SASL}test_sessions_end_with_the_credential_they_began_by",
        ),
    ),
    17: Attack(
        "prefixes, wildcards, denials beside them, hosts and their spellings, case",
        (
            f"{ACLS}test_it_decides_as_a_scan_of_all_bindings_does",
            f"{ACLS}test_addresses_have_one_spelling",
            "node/security/test_authorizer.py::test_decisions",
            "node/security/test_authorizer.py::test_hosts_are_addresses",
        ),
    ),
    18: Attack(
        "finding out what exists",
        (
            f"{MATRIX}test_every_api_refuses_strangers_and_tells_them_nothing",
            f"{MATRIX}test_every_route_refuses_strangers_and_tells_them_nothing",
            f"{MATRIX}test_answers_about_several_are_in_no_order_that_tells_what_is_there",
            f"{MATRIX}test_a_list_of_one_topic_does_not_tell_whether_it_is_there",
            f"{WIRE}test_strangers_produce_and_fetch_nothing",
            f"{WIRE}test_answers_about_several_are_in_no_order_that_tells_what_is_there",
            f"{GRPC}test_every_method_refuses_strangers_and_tells_them_nothing",
        ),
    ),
    19: Attack(
        "finding out what exists by topic ids and collisions of names",
        (
            "golden/authorization/test_kept.py::"
            "test_topics_that_are_not_there_are_answered_as_those_of_others",
            f"{TAKEN}test_who_may_create_nothing_learns_no_names",
            f"{WIRE}test_strangers_produce_and_fetch_nothing",
        ),
        "as in Kafka an id that no topic has is told from that of another's topic, and who may "
        "create topics learns which names are taken: ids are random, 122 bits of them",
    ),
    20: Attack(
        "forwarded requests: forged principals, none, another controller",
        (
            "node/kafka/test_request_authorizer.py::"
            "test_the_controller_decides_by_whoever_made_a_request_that_was_sent_on",
            f"{NODES}test_a_node_speaks_in_its_own_name",
            f"{NODES}test_nothing_is_served_before_the_connection_is_open",
            "sim/test_security_history.py::test_no_rule_is_broken",
        ),
    ),
    21: Attack(
        "between nodes: another cluster, a client's key, another's id, messages of who is refused",
        (
            "failover/test_tls_between_nodes.py::"
            "test_who_is_no_node_says_nothing_on_the_listener_between_nodes",
            f"{NODES}test_a_connection_names_the_cluster_once_there_is_one",
            f"{NODES}test_a_hello_with_the_id_of_another_node_changes_nothing",
            f"{NODES}test_raft_messages_after_a_refusal_change_nothing",
            f"{NODES}test_nothing_long_is_put_together_before_the_connection_is_open",
            f"{DOORS}test_a_node_that_may_be_one_no_more_is_cut_off",
        ),
        "a node's key may speak for the id of a node that is not there: its holder is a member",
    ),
    22: Attack(
        "browsers: rebinding, other sites, scripts in names and records, smuggling",
        (
            f"{HTTP}test_pages_of_other_sites_are_refused",
            f"{HTTP}test_pages_from_elsewhere_change_nothing",
            f"{HTTP}test_all_but_probes_needs_a_known_host",
            f"{HTTP}test_what_is_not_http",
            f"{TAKEN}test_a_browser_that_remembers_a_password_serves_no_other_site",
            f"{TAKEN}test_no_connection_becomes_a_websocket",
            "console/test_browser.py::test_hostile_text_neither_hides_nor_spreads",
        ),
    ),
    23: Attack(
        "quotas: invented client ids, acks=0, many connections, clocks",
        (
            "node/security/test_client_quotas.py::test_invented_client_ids_fill_no_memory",
            "node/security/test_client_quotas.py::"
            "test_long_client_ids_fill_no_memory_and_have_quotas_of_their_own",
            "node/security/test_client_quotas.py::test_who_shares_a_quota_shares_its_meter",
            f"{QUOTAS}test_acks_0_is_held_back_too",
            f"{QUOTAS}test_a_muted_connection_gets_the_answer_of_its_parked_fetch",
            "node/wire/test_connection_rates.py::"
            "test_an_address_over_its_quota_is_closed_and_others_are_served",
            f"{USAGE}test_who_produces_too_much_by_http_is_sent_away_until_he_may_come_again",
            f"{USAGE}test_a_stream_of_grpc_is_as_fast_as_the_quota",
        ),
        "rates go by a clock that nobody sets",
    ),
    24: Attack(
        "secrets in logs, pages, dumps, errors, process lists",
        (
            "testing/test_planted_secrets.py::",
            "cluster/metadata/test_dump.py::test_secrets_are_hidden",
        ),
    ),
    25: Attack(
        "the first start, and files that others could read or put in the way",
        (
            f"{FIRST}test_a_new_cluster_begins_with_its_users_and_a_restart_resets_nothing",
            f"{FIRST}test_no_node_begins_without_the_password_that_it_was_given_a_file_for",
            f"{FIRST}test_nobody_is_accepted_before_the_first_user_is_there",
            f"{FIRST}test_voters_that_were_given_different_users_agree_on_those_of_one",
            f"{TAKEN}test_who_lost_the_administrators_password_gets_in_by_the_nodes_file_alone",
            "node/replicas/test_private_files.py::"
            "test_what_is_created_is_private_whatever_the_umask",
            "node/kafka_import/test_adopt.py::test_a_symbolic_link_is_refused_by_its_path",
        ),
        "voters that are given different passwords: those of one of them count, whole (the entry "
        "that forms the cluster has them)",
    ),
}


@pytest.mark.parametrize("number", ATTACKS)
def test_every_attack_has_its_tests(number: int) -> None:
    missing = []
    for cited in ATTACKS[number].tests:
        file, _, name = cited.partition("::")
        text = (TESTS / file).read_text("utf-8")
        if not re.search(rf"^(async )?def {name or 'test_'}", text, re.MULTILINE):
            missing.append(cited)
    assert not missing


def test_none_is_left_out() -> None:
    assert list(ATTACKS) == list(range(1, 26))


def test_the_map_of_others_tests_names_ours() -> None:
    text = Path(__file__).with_name("anchors.md").read_text("utf-8")
    cited = set(re.findall(r"`(test_\w+)`", text))
    known = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
    }
    assert cited and not cited - known
