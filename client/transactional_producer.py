"""A producer with a transactional id, over a :class:`kept.client.client.Client`.

::

    with TransactionalProducer(client, "payments") as producer:
        producer.produce("orders", [OutRecord(b"k", b"v")])

commits at the end of the block, and aborts where an error leaves it. It speaks version 1 of the
protocol, which every broker with transactions serves: a partition joins by AddPartitionsToTxn, and
the epoch stays from one transaction to the next (KIP-98). Not thread-safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Final, Self

from kept.client.client import Client, IdempotentProducer, OutRecord
from kept.client.core.broker_errors import failure
from kept.client.core.calls import Call, ToCoordinator
from kept.client.produce import (
    TRANSACTION_TIMEOUT_MS,
    Produced,
    ProduceOptions,
    init_producer_id,
)
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import InvalidTxnState, KeptError
from kept.storage.types import Codec, TopicPartition

_ADD_VERSION: Final = 3
"""Of AddPartitionsToTxn; brokers ask each other in newer ones."""
_END_VERSION: Final = 4
"""Of EndTxn; newer ones belong to version 2 of transactions, as Produce does above 11."""
_NOT_ATTEMPTED: Final = 55


class TransactionEnded(InvalidTxnState):
    """The transaction could not be ended so, since an end whose answer was lost had ended it the
    other way: ``committed`` says which. The next ``produce`` begins another one.
    """

    def __init__(self, message: str, *, committed: bool) -> None:
        super().__init__(message)
        self.committed = committed


class TransactionalProducer:
    """Fences the producers before it that had this id, and ends what they left open.

    ``timeout_ms``: the coordinator aborts a transaction that takes longer; at most the broker's
    ``transaction.max.timeout.ms``. Raises KeptError where the id is refused.
    """

    def __init__(
        self, client: Client, transactional_id: str, timeout_ms: int = TRANSACTION_TIMEOUT_MS
    ) -> None:
        self.client = client
        self.transactional_id = transactional_id
        self.timeout_ms = timeout_ms
        self.producer_id, self.epoch = client.run(
            init_producer_id(client.timeout_ms, transactional_id, timeout_ms)
        )
        self._sequences: dict[TopicPartition, int] = {}
        self._joined: set[TopicPartition] = set()
        self._failed = False
        """An error has left open what of this transaction was written, or whether it is aborted."""
        self._commit_in_doubt = False
        """A commit got no answer: the transaction is open, or it was committed."""
        self._needs_epoch = False
        """Nobody knows which sequences the partitions await, or an end without an answer may be on
        its way and would end the next transaction: a new epoch begins at 0, and fences it.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.commit()
            return
        with contextlib.suppress(KeptError):  # it times out, then
            self.abort()

    def produce(
        self, topic: str, records: Iterable[OutRecord], *, codec: Codec = Codec.NONE
    ) -> list[Produced]:
        """Write records in the transaction, which the first of them begins, and wait for all
        replicas in sync. After an error only :meth:`abort` is possible; then the next transaction.
        Raises InvalidTxnState, too, while nobody knows whether the last one was committed.
        """
        self._refuse_if_failed()
        if self._commit_in_doubt:
            raise InvalidTxnState(
                f"transaction of {self.transactional_id}: its commit got no answer, so it may be "
                "committed or not; call commit() again, or abort()"
            )
        if self._needs_epoch:
            self._renew()
        try:
            return self._produce(topic, records, codec)
        except BaseException:
            self._failed = True
            raise

    def _produce(self, topic: str, records: Iterable[OutRecord], codec: Codec) -> list[Produced]:
        producer = IdempotentProducer(self.producer_id, self.epoch, self._sequences)
        out = self.client.outgoing(
            topic, records, codec=codec, producer=producer, is_transactional=True
        )
        new = [TopicPartition(topic, p) for p in out.batches]
        new = [tp for tp in new if tp not in self._joined]
        if new:
            self.client.call(self._add_call(topic, [tp.partition for tp in new]))
            self._joined.update(new)
        options = ProduceOptions(
            timeout_ms=self.client.timeout_ms, transactional_id=self.transactional_id
        )
        return self.client.write(topic, out, options)

    def commit(self) -> None:
        """End the transaction; nothing to do where none has begun. Raises InvalidTxnState where a
        ``produce`` failed. Any other error leaves open whether it is committed: then ``commit``
        again finishes it, and :meth:`abort` aborts it or says that it was committed.
        """
        self._refuse_if_failed()
        self._end(committed=True)

    def abort(self) -> None:
        """End the transaction without its records; nothing to do where none has begun. Raises
        TransactionEnded where a ``commit`` before it got no answer, but has committed them. After
        any other error only ``abort`` is possible again, or ``commit`` where that is in doubt.
        """
        self._end(committed=False)

    def _end(self, *, committed: bool) -> None:
        if not self._joined and not self._failed:
            return
        what = f"EndTxn of {self.transactional_id}"
        values = {**self._producer(), "committed": committed}
        call = self._call(ApiKey.END_TXN, values, what, _END_VERSION, lambda r: int(r.error_code))
        try:
            self.client.call(call)
        except InvalidTxnState as error:
            if self._commit_in_doubt:
                self._ended()
                raise self._ended_otherwise(committed=not committed) from error
            if self._joined:
                raise  # else the request that was to begin it had no effect
        except BaseException:
            if committed:
                self._commit_in_doubt = True
            elif not self._commit_in_doubt:
                self._failed = True
            raise
        self._ended()

    def _ended(self) -> None:
        self._joined.clear()
        self._needs_epoch |= self._failed or self._commit_in_doubt
        self._failed = self._commit_in_doubt = False

    def _ended_otherwise(self, *, committed: bool) -> TransactionEnded:
        end, wanted = ("committed", "aborted") if committed else ("aborted", "committed")
        return TransactionEnded(
            f"transaction of {self.transactional_id}: it was {end}, by a request that got no "
            f"answer, and cannot be {wanted} any more",
            committed=committed,
        )

    def _refuse_if_failed(self) -> None:
        if self._failed:
            raise InvalidTxnState(
                f"transaction of {self.transactional_id}: a produce or an abort failed, "
                "it can only be aborted"
            )

    def _renew(self) -> None:
        self.producer_id, self.epoch = self.client.run(
            init_producer_id(
                self.client.timeout_ms,
                self.transactional_id,
                self.timeout_ms,
                (self.producer_id, self.epoch),
            )
        )
        self._sequences.clear()
        self._needs_epoch = False

    def _producer(self) -> dict[str, Any]:
        return {
            "transactional_id": self.transactional_id,
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch,
        }

    def _add_call(self, topic: str, partitions: list[int]) -> Call:
        what = f"AddPartitionsToTxn of {self.transactional_id}: {topic}"
        topics = [{"name": topic, "partitions": partitions}]
        values = {**self._producer(), "topics": topics}
        old = {f"v3_and_below_{name}": value for name, value in values.items()}

        def error_code(response: Any) -> int:
            (one,) = response.results_by_topic_v3_and_below
            codes = [int(p.partition_error_code) for p in one.results_by_partition]
            return next((code for code in codes if code not in (0, _NOT_ATTEMPTED)), 0)

        return self._call(ApiKey.ADD_PARTITIONS_TO_TXN, old, what, _ADD_VERSION, error_code)

    def _call(
        self, api: ApiKey, values: dict[str, Any], what: str, version: int, error_code: Any
    ) -> Call:
        return Call(
            api,
            values,
            ToCoordinator(self.transactional_id, kind=1),
            what=what,
            timeout_ms=self.client.timeout_ms,
            check=lambda r: failure(error_code(r), what, key=self.transactional_id),
            max_version=version,
        )
