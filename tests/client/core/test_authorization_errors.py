"""Who may not do what, and what would allow it."""

from __future__ import annotations

import pickle

import pytest

from kept.client.admin.transactions import describe_transaction
from kept.client.core.authorization_errors import NotAuthorized
from kept.client.core.broker_errors import failure
from kept.client.core.calls import ToCoordinator
from kept.client.produce import init_producer_id
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import TransactionalIdAuthorizationFailed
from tests.support.client_world import World, offsets
from tests.support.fake_client import response

CASES = [
    (29, "Fetch of orders:0", "Read on topic orders", "read topic:orders"),
    (29, "Fetch of a-b-12:3, c:1", "Read on topic a-b-12", "read topic:a-b-12"),
    (29, "Produce to orders:0", "Write on topic orders", "write topic:orders"),
    (29, "Metadata of orders-0", "Describe on topic orders-0", "describe topic:orders-0"),
    (29, "ListOffsets of orders:7", "Describe on topic orders", "describe topic:orders"),
    (29, "DeleteTopics of orders-7", "Delete on topic orders-7", "delete topic:orders-7"),
    (29, "OffsetCommit of g: orders:0", "Read on topic orders", "read topic:orders"),
    (29, "DeleteRecords of orders-1:0", "Delete on topic orders-1", "delete topic:orders-1"),
    (29, "OffsetDelete of g: orders:0", "Read on topic orders", "read topic:orders"),
    (29, "AddPartitionsToTxn of bank: orders", "Write on topic orders", "write topic:orders"),
    (29, "AlterConfigs of orders", "AlterConfigs on topic orders", "alter-configs topic:orders"),
    (31, "DescribeQuorum", "Describe on the cluster", "describe cluster"),
    (31, "ElectLeaders", "Alter on the cluster", "alter cluster"),
    (
        31,
        "InitProducerId",
        "IdempotentWrite on the cluster, or Write on a topic",
        "write topic:NAME",
    ),
    (29, "OffsetCommit of a: b, c: orders:0", "Read on topic orders", "read topic:orders"),
    (29, "AddPartitionsToTxn of bank: eu: orders", "Write on topic orders", "write topic:orders"),
]


@pytest.mark.parametrize(("code", "what", "lacks", "rule"), CASES)
def test_who_may_not_do_what_and_what_would_allow_it(code, what, lacks, rule):
    see(failure(code, what), what, lacks, rule)


KEYS = ["g", "app: eu", "a, b", "app: orders:0"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("what", "operation", "rule"),
    [
        ("OffsetCommit of {}", "Read", "read"),
        ("OffsetCommit of {}: orders:0", "Read", "read"),
        ("OffsetFetch of {}", "Describe", "describe"),
        ("OffsetDelete of {}: orders:0", "Delete", "delete"),
    ],
)
def test_a_group_may_have_any_characters(key, what, operation, rule):
    what = what.format(key)
    see(failure(30, what, key=key), what, f"{operation} on group {key}", f"{rule} group:{key}")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("what", ["InitProducerId of {}", "AddPartitionsToTxn of {}: orders"])
def test_a_transactional_id_may_have_any_characters(key, what):
    what = what.format(key)
    lacks, rule = f"Write on transactional id {key}", f"write transactional-id:{key}"
    see(failure(53, what, key=key), what, lacks, rule)


def test_a_transactional_id_is_named_as_it_is():
    denied = {"error_code": 53, "producer_id": -1, "producer_epoch": -1}
    state = {
        **denied,
        "transactional_id": "bank: eu",
        "transaction_state": "",
        "transaction_timeout": 0,
        "transaction_start_time": None,
        "topics": (),
    }
    for operation, version, values in (
        (describe_transaction("bank: eu"), 0, {"transaction_states": [state]}),
        (init_producer_id(1000, "bank: eu"), 4, denied),
    ):
        (call,) = next(operation)
        error = call.check(response(call.api_key, version, **values))
        assert str(error).endswith(" transactional-id:bank: eu)")


def test_a_group_whose_coordinator_may_not_be_found_is_named_as_it_is():
    world = World()
    said = {"error_code": 30, "error_message": None, "node_id": -1, "host": "", "port": -1}
    found = {**said, "key": "app: eu"}
    world.answers[ApiKey.FIND_COORDINATOR] = lambda *_: {**said, "coordinators": [found]}
    call = offsets(world, route=ToCoordinator("app: eu"), what="OffsetFetch of app: eu")
    world.run()
    with pytest.raises(NotAuthorized, match=r" describe group:app: eu\)$"):
        world.result(call)


def test_a_coordinator_that_is_refused_for_another_reason_is_no_right_that_is_missing():
    """A cluster that does not serve transactions refuses them by the code for a missing right."""
    world = World()
    said = {"error_code": 53, "error_message": "not served", "node_id": -1, "host": "", "port": -1}
    found = {**said, "key": "app"}
    world.answers[ApiKey.FIND_COORDINATOR] = lambda *_: {**said, "coordinators": [found]}
    call = offsets(world, route=ToCoordinator("app", 1), what="InitProducerId of app")
    world.run()
    with pytest.raises(TransactionalIdAuthorizationFailed) as error:
        world.result(call)
    assert str(error.value) == (
        "InitProducerId of app: TRANSACTIONAL_ID_AUTHORIZATION_FAILED (not served)"
    )


def see(error, what, lacks, rule):
    assert isinstance(error, NotAuthorized)
    assert f"this client lacks {lacks};" in str(error)
    assert str(error).endswith(f"kept acl add User:NAME {rule})")
    named = pickle.loads(pickle.dumps(error.named("User:ada")))
    assert str(named).startswith(f"{what}: ") and f"(User:ada lacks {lacks};" in str(named)
    assert str(named).endswith(f"kept acl add User:ada {rule})")
