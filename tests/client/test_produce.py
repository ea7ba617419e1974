"""Batches that are too large for their topic are split, without a node."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

from kept.client.client import Client, IdempotentProducer, OutRecord
from kept.client.core.authorization_errors import NotAuthorized
from kept.client.core.broker_errors import AuthenticationFailed, BrokerError, ConnectionFailed
from kept.client.core.calls import Call
from kept.client.produce import RecordTooLarge, unwritten
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import InvalidRecord, KeptError, MessageTooLarge, RecordListTooLarge
from kept.storage.records import build_batch, read_header, records
from kept.storage.types import MAX_INT32, Codec, TopicPartition
from tests.support.fake_client import FakeClient, response

MESSAGE_TOO_LARGE = 10
RECORD_LIST_TOO_LARGE = 18
TOPIC_AUTHORIZATION_FAILED = 29
INVALID_RECORD = 87


class Leader(FakeClient):
    """Leads every partition of topic ``t``, and takes batches of no more than ``most`` bytes.

    ``taken``: (partition, first sequence, values) of each batch in the order in which they came.
    ``fails``: what a batch with such a value ends with.
    """

    def __init__(self, partitions: int, most: int, code: int = MESSAGE_TOO_LARGE) -> None:
        super().__init__({"t": partitions})
        self.most, self.code = most, code
        self.taken: list[tuple[int, int, list[bytes | None]]] = []
        self.refused = 0
        self.fails: dict[bytes, int | KeptError] = {}

    def calls(self, calls: Sequence[Call]) -> list[Any]:
        return [self._answer(call) for call in calls]

    def _answer(self, call: Call) -> Any:
        assert call.api_key == ApiKey.PRODUCE
        values = call.values(9) if callable(call.values) else call.values
        (data,) = values["topic_data"][0]["partition_data"]
        batch = data["records"]
        fits = len(batch) <= self.most
        rows = [record.value or b"" for record in records(batch)]
        fails = next((self.fails[value] for value in rows if value in self.fails), 0)
        if fits and isinstance(fails, KeptError):
            raise fails
        if fits and not fails:
            self.taken.append((data["index"], read_header(batch).base_sequence, rows))
        self.refused += not fits
        if not call.expects_response:
            return None
        code = fails if fits else self.code
        partition = {"index": data["index"], "error_code": code, "base_offset": len(self.taken)}
        topic = {"name": "t", "partition_responses": [partition | {"record_errors": ()}]}
        answer = response(call.api_key, 9, responses=[topic])
        error = call.check(answer) if call.check else None
        if error is not None:
            raise error
        return answer

    def values(self, partition: int) -> list[bytes | None]:
        return [value for where, _, rows in self.taken if where == partition for value in rows]


def rows(*sizes: int, partition: int = 0) -> list[OutRecord]:
    return [
        OutRecord(None, b"%d " % n + bytes(size), (), 1, partition) for n, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("code", [MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE])
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP])
def test_a_batch_that_is_too_large_goes_in_parts_in_order(code, codec):
    leader, sent = Leader(2, 400, code), [*rows(*[90] * 20), *rows(*[90] * 20, partition=1)]
    if codec:
        noise = random.Random(1)
        sent = [record._replace(value=noise.randbytes(90)) for record in sent]
    producer = IdempotentProducer(7, 0, {TopicPartition("t", 0): MAX_INT32 - 4})
    done = leader.produce("t", sent, producer=producer, codec=codec)
    assert 2 < len(done) == len(leader.taken) < len(sent), "of more than one record each"
    assert [each.base_offset for each in done] == list(range(1, len(done) + 1))
    for partition, start in ((0, MAX_INT32 - 4), (1, 0)):
        assert leader.values(partition) == [r.value for r in sent if r.partition == partition]
        sequence = start
        for where, first, values in leader.taken:
            if where == partition:
                assert first == sequence & MAX_INT32
                sequence += len(values)
    assert producer.sequences == {TopicPartition("t", 0): 15, TopicPartition("t", 1): 20}


def test_what_was_refused_once_is_not_sent_in_that_size_again():
    leader = Leader(1, 200)
    leader.produce("t", rows(*[90] * 64))
    assert leader.refused == 6, "64, 32, 16, 8, 4 and 2 records, each once"


def told_anew(topics: Sequence[str]) -> Any:
    """Metadata of these topics."""
    named = [
        {"name": n, "topic_id": UUID(int=1), "partitions": (), "error_code": 0} for n in topics
    ]
    return response(ApiKey.METADATA, 12, brokers=(), topics=named)


@pytest.mark.parametrize("all_topics", [True, False])
def test_a_limit_is_known_until_the_topic_is_told_anew(all_topics):
    leader, known = Leader(1, 200), ("t",)
    leader.produce("t", rows(*[90] * 8))
    learned, topics = leader.refused, dict(leader.view.topics)
    leader.produce("t", rows(*[90] * 64))
    assert leader.refused == learned == 3 and len(leader.values(0)) == 72
    with pytest.raises(MessageTooLarge):
        Client.append(leader, "t", {0: build_batch([(1, None, bytes(25), ())] * 8)})
    assert leader.refused == learned + 1, "what is given whole is not split"
    leader.most = 10_000
    leader.view.update(told_anew(["u"]), ("u",))
    leader.view.topics.update(topics)
    count = len(leader.taken)
    leader.produce("t", rows(*[90] * 64))
    assert len(leader.taken) == count + 64
    leader.view.update(told_anew(["t"]), None if all_topics else known)
    leader.view.topics.update(topics)
    leader.produce("t", rows(*[90] * 64))
    assert len(leader.taken) == count + 65, "it may have been raised, and was"


def test_a_record_that_is_too_large_is_named_and_what_comes_after_it_is_not_written():
    leader = Leader(3, 400)
    sent = [*rows(9, 9, 500, 9, 9), *rows(9, 9, partition=1), *rows(9, 900, 9, partition=2)]
    producer = IdempotentProducer(7, 0)
    with pytest.raises(RecordTooLarge, match="Produce to t:0: MESSAGE_TOO_LARGE") as raised:
        leader.produce("t", sent, producer=producer)
    assert raised.value.unwritten == [2, 3, 4, 8, 9]
    for partition, count in ((0, 2), (1, 2), (2, 1)):
        theirs = [r.value for r in sent if r.partition == partition]
        assert leader.values(partition) == theirs[:count]
    assert producer.id == -1, "nobody knows its sequences"


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("earlier_try", [False, True])
def test_a_refusal_in_the_middle_of_a_split_says_what_is_written(
    monkeypatch, partitions, earlier_try
):
    """Who would go on with the first record otherwise wrote those before it twice."""
    leader, sent = Leader(partitions, 1200), rows(*[90] * 40)
    leader.fails = {sent[33].value or b"": INVALID_RECORD}
    answer = leader._answer

    def answered(call: Call) -> Any:
        call.may_have_effect |= earlier_try
        return answer(call)

    monkeypatch.setattr(leader, "_answer", answered)
    producer = IdempotentProducer(7, 0)
    with pytest.raises(InvalidRecord) as raised:
        leader.produce("t", sent, producer=producer)
    count = len(leader.values(0))
    assert 10 <= count <= 33 and leader.values(0) == [r.value for r in sent[:count]]
    told = unwritten(raised.value)
    assert told is not None and told.places == (None if earlier_try else list(range(count, 40)))
    assert producer.id == -1


@pytest.mark.parametrize("user", ["", "ada"])
def test_a_right_that_is_taken_away_in_the_middle_of_a_split(user):
    """Without a user, only the node knows who this is: a certificate, or a token."""
    leader, sent = Leader(1, 1200), rows(*[90] * 40)
    leader.security.protocol, leader.security.user = "SSL", user
    leader.fails = {sent[33].value or b"": TOPIC_AUTHORIZATION_FAILED}
    with pytest.raises(NotAuthorized) as raised:
        leader.produce("t", sent)
    count, told = len(leader.values(0)), unwritten(raised.value)
    assert count and told is not None and told.places == list(range(count, 40))


def test_a_refusal_beside_another_partition_leaves_open_what_is_written():
    leader, sent = Leader(2, 1200), [*rows(*[90] * 40), *rows(*[90] * 40, partition=1)]
    leader.fails = {b"33 " + bytes(90): INVALID_RECORD}
    with pytest.raises(InvalidRecord) as raised:
        leader.produce("t", sent)
    told = unwritten(raised.value)
    assert leader.taken and told is not None and told.places is None


@pytest.mark.parametrize("kind", [ConnectionFailed, AuthenticationFailed, BrokerError])
def test_what_leaves_open_whether_a_part_is_written(kind):
    """A connection that is lost in the middle of a split, say."""
    leader, sent = Leader(1, 1200), rows(*[90] * 40)
    leader.fails = {sent[33].value or b"": kind("n:1: Produce to t:0: it broke")}
    with pytest.raises(kind, match="it broke") as raised:
        leader.produce("t", sent)
    told = unwritten(raised.value)
    assert leader.taken and told is not None and told.places is None


@pytest.mark.parametrize(
    ("code", "error"),
    [(MESSAGE_TOO_LARGE, MessageTooLarge), (RECORD_LIST_TOO_LARGE, RecordListTooLarge)],
)
def test_a_batch_that_is_given_whole_is_not_split(code, error):
    leader = Leader(1, 100, code)
    batch = build_batch([(1, None, bytes(90), ())] * 2)
    with pytest.raises(error):
        Client.append(leader, "t", {0: batch})
    assert (leader.taken, leader.refused) == ([], 1)


def test_without_acknowledgements_nobody_learns_what_is_refused():
    leader = Leader(1, 100)
    done = leader.produce("t", rows(90, 90), acks=0)
    assert [each.base_offset for each in done] == [-1]
    assert (leader.taken, leader.refused) == ([], 1)
