"""Who may not do what, and what would allow it."""

from __future__ import annotations

import pickle

import pytest

from kept.client.core.authorization_errors import NotAuthorized
from kept.client.core.broker_errors import failure

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
    (30, "OffsetCommit of g", "Read on group g", "read group:g"),
    (30, "OffsetFetch of g", "Describe on group g", "describe group:g"),
    (31, "DescribeQuorum", "Describe on the cluster", "describe cluster"),
    (31, "ElectLeaders", "Alter on the cluster", "alter cluster"),
    (
        31,
        "InitProducerId",
        "IdempotentWrite on the cluster, or Write on a topic",
        "write topic:NAME",
    ),
    (53, "InitProducerId of t", "Write on transactional id t", "write transactional-id:t"),
]


@pytest.mark.parametrize(("code", "what", "lacks", "rule"), CASES)
def test_who_may_not_do_what_and_what_would_allow_it(code, what, lacks, rule):
    error = failure(code, what)
    assert isinstance(error, NotAuthorized)
    assert f"this client lacks {lacks};" in str(error)
    assert str(error).endswith(f"kept acl add User:NAME {rule})")
    named = pickle.loads(pickle.dumps(error.named("User:ada")))
    assert str(named).startswith(f"{what}: ") and f"(User:ada lacks {lacks};" in str(named)
    assert str(named).endswith(f"kept acl add User:ada {rule})")
