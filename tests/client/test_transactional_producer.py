"""A transactional producer whose requests lose their answers, without a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kept.client.client import OutRecord
from kept.client.core.broker_errors import NoResponse
from kept.client.core.calls import Call
from kept.client.protocol.api_keys import ApiKey
from kept.client.transactional_producer import TransactionalProducer, TransactionEnded
from kept.storage.errors import InvalidTxnState
from tests.support.fake_client import FakeClient, response

INVALID_PRODUCER_EPOCH = 47
INVALID_TXN_STATE = 48
ROW = [OutRecord(b"k", b"v", partition=0)]


class Coordinator(FakeClient):
    """Answers as the coordinator of one id does, and as the leader of ``t-0``.

    ``lost``: one entry for each of the next EndTxn requests that get no answer; True where the
    request arrives and its answer is lost, False where the request is lost.
    """

    def __init__(self) -> None:
        super().__init__({"t": 1})
        self.epoch = -1
        self.state = "empty"
        self.open: list[str] = []
        self.committed = 0
        self.lost: list[bool] = []

    def calls(self, calls: Sequence[Call]) -> list[Any]:
        return [self._answer(call) for call in calls]

    def _answer(self, call: Call) -> Any:
        values = call.values(9) if callable(call.values) else call.values
        match call.api_key:
            case ApiKey.INIT_PRODUCER_ID:
                self.epoch += 1
                self.state, self.open = "empty", []
                answer = response(
                    call.api_key, 4, error_code=0, producer_id=7, producer_epoch=self.epoch
                )
            case ApiKey.ADD_PARTITIONS_TO_TXN:
                self.state = "ongoing"
                partition = {"partition_index": 0, "partition_error_code": 0}
                topic = {"name": "t", "results_by_partition": [partition]}
                answer = response(call.api_key, 3, results_by_topic_v3_and_below=[topic])
            case ApiKey.PRODUCE:
                code = 0 if self.state == "ongoing" else INVALID_TXN_STATE
                self.open += ["v"] * (code == 0)
                partition = {"index": 0, "error_code": code, "base_offset": 0, "record_errors": ()}
                topic = {"name": "t", "partition_responses": [partition]}
                answer = response(call.api_key, 9, responses=[topic])
            case ApiKey.END_TXN:
                arrives = self.lost[0] if self.lost else True
                code = self._end(values) if arrives else 0
                if self.lost:
                    self.lost.pop(0)
                    raise NoResponse(f"{call.name}: no answer")
                answer = response(call.api_key, 4, error_code=code)
            case other:
                raise AssertionError(other)
        error = call.check(answer) if call.check else None
        if error is not None:
            raise error
        return answer

    def _end(self, values: Any) -> int:
        if values["producer_epoch"] != self.epoch:
            return INVALID_PRODUCER_EPOCH
        wanted = "committed" if values["committed"] else "aborted"
        if self.state == "ongoing":
            self.committed += len(self.open) if values["committed"] else 0
            self.state, self.open = wanted, []
        return 0 if self.state == wanted else INVALID_TXN_STATE


@pytest.fixture
def client() -> Coordinator:
    return Coordinator()


@pytest.fixture
def producer(client: Coordinator) -> TransactionalProducer:
    producer = TransactionalProducer(client, "id")
    producer.produce("t", ROW)
    return producer


def goes_on(client: Coordinator, producer: TransactionalProducer) -> None:
    """The next transaction is committed, in an epoch of its own."""
    epoch, committed = client.epoch, client.committed
    with producer:
        producer.produce("t", ROW)
    assert (client.epoch, client.committed) == (epoch + 1, committed + 1)


def loses(client: Coordinator, end: Callable[[], None], *, arrives: bool) -> None:
    client.lost.append(arrives)
    with pytest.raises(NoResponse):
        end()


def test_abort_after_a_commit_whose_answer_was_lost_says_that_it_was_committed(client, producer):
    loses(client, producer.commit, arrives=True)
    with pytest.raises(TransactionEnded, match=r"id: it was committed.*cannot be aborted") as ended:
        producer.abort()
    assert ended.value.committed
    assert client.committed == 1
    producer.abort()  # nothing is open
    goes_on(client, producer)


def test_abort_after_a_commit_that_did_not_arrive_aborts(client, producer):
    loses(client, producer.commit, arrives=False)
    producer.abort()
    assert (client.state, client.committed) == ("aborted", 0)
    goes_on(client, producer)


@pytest.mark.parametrize("arrives", [True, False])
def test_commit_again_finishes_one_that_got_no_answer(client, producer, arrives):
    loses(client, producer.commit, arrives=arrives)
    producer.commit()
    assert client.committed == 1
    goes_on(client, producer)


@pytest.mark.parametrize("arrives", [True, False])
def test_nothing_is_produced_while_a_commit_is_in_doubt(client, producer, arrives):
    loses(client, producer.commit, arrives=arrives)
    with pytest.raises(InvalidTxnState, match=r"may be committed or not; call commit\(\) again"):
        producer.produce("t", ROW)
    producer.commit()
    goes_on(client, producer)


def test_commit_after_a_commit_and_an_abort_without_answers_says_which_it_was(client, producer):
    loses(client, producer.commit, arrives=False)
    loses(client, producer.abort, arrives=True)
    with pytest.raises(TransactionEnded, match=r"it was aborted.*cannot be committed") as ended:
        producer.commit()
    assert not ended.value.committed
    goes_on(client, producer)


def test_after_an_abort_without_an_answer_nothing_is_committed(client, producer):
    """The caller wanted those records gone: they must not end in the next transaction."""
    loses(client, producer.abort, arrives=False)
    for refused in (producer.commit, lambda: producer.produce("t", ROW)):
        with pytest.raises(InvalidTxnState, match="it can only be aborted"):
            refused()
    producer.abort()
    assert client.committed == 0
    goes_on(client, producer)


def test_who_may_not_use_an_id_is_told_which():
    producer = TransactionalProducer(Coordinator(), "bank: eu")
    call = producer._add_call("orders", [0])
    for code, resource in ((53, "transactional-id:bank: eu"), (29, "topic:orders")):
        partition = {"partition_index": 0, "partition_error_code": code}
        topic = {"name": "orders", "results_by_partition": [partition]}
        assert call.check is not None
        error = call.check(response(call.api_key, 3, results_by_topic_v3_and_below=[topic]))
        assert str(error).endswith(f"kept acl add User:NAME write {resource})")
