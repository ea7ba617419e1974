"""Writing records: operations without I/O (see :mod:`kept.client.admin.topics`).

A batch that is too large for its topic is split and sent again, as Kafka's clients do: its parts go
one after the other, with the sequence numbers that their records had in it. Later batches are split
before they are sent, until Metadata tells of the topic anew: its limit may have been raised. What
was refused as too large was not written, so that nothing is there twice; but for a batch without a
producer id whose earlier try had no answer, if the limit was lowered in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

from kept.client.admin.topics import Operation
from kept.client.core.broker_errors import AuthenticationFailed, BrokerError, NotKafka, failure
from kept.client.core.calls import NOT_EXECUTED, Anywhere, Call, Route, ToCoordinator, ToLeader
from kept.client.core.metadata import ClusterMetadata
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import (
    KeptError,
    MessageTooLarge,
    PeerError,
    RecordListTooLarge,
    RequestTimedOut,
    RetriableError,
)
from kept.storage.records import Record, build_batch, read_header, records
from kept.storage.types import MAX_INT32, NO_SEQUENCE, TopicPartition

TRANSACTION_TIMEOUT_MS: Final = 60_000
"""After so long its coordinator aborts a transaction, unless the producer says otherwise."""
_NO_TRANSACTIONS_V2: Final = 11
"""The newest version of Produce in which partitions do not join a transaction by being written."""
_TOO_LARGE: Final = (MessageTooLarge, RecordListTooLarge)


class Produced(NamedTuple):
    """Where a batch went; the base offset is -1 with acks=0. ``log_append_ms``: where the topic
    stamps records itself, with that.
    """

    partition: int
    base_offset: int
    log_append_ms: int | None = None


class Outgoing(NamedTuple):
    """Records that are to be written: a batch for each partition, and the ``places`` that its
    records had among those given, from 0.
    """

    batches: dict[int, bytes]
    places: dict[int, list[int]]


class RecordTooLarge(MessageTooLarge):
    """A record that is too large for its topic, alone in a batch. ``unwritten`` are the places of
    that record and of those that come after it in its partition, ascending; all others of the same
    ``produce`` are written.
    """

    def __init__(self, message: str, unwritten: Sequence[int]) -> None:
        super().__init__(message)
        self.unwritten = unwritten


class AppendUncertain(RetriableError):
    """A leader gave a batch offsets, and then led no longer or could not write it: whoever leads
    next may have it, or not.
    """


class Unwritten(KeptError):
    """The cause of an error that ended a ``produce``: the ``places`` that are not written,
    ascending; None where some of all its records may be written, and it is not known which.
    """

    def __init__(self, places: Sequence[int] | None) -> None:
        which = "some of the records may be" if places is None else f"{len(places)} records are not"
        super().__init__(f"{which} written")
        self.places = places


def unwritten(error: BaseException) -> Unwritten | None:
    """What is not written after this error; None where it came before anything was sent."""
    if isinstance(error, RecordTooLarge):
        return Unwritten(error.unwritten)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Unwritten):
        cause = cause.__cause__
    return cause


@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceOptions:
    """How batches are written. ``acks``: -1 for all replicas in sync, 1 for the leader, 0 for no
    answer: then nobody learns what was refused. ``at_most_once``: a request goes again only where
    it had no effect; a leader whose refusal hides an append says so by its offset, as those of kept
    and of Apache Kafka do. The partitions have joined the transaction of ``transactional_id``.
    """

    timeout_ms: int
    acks: int = -1
    auto_create: bool = False
    at_most_once: bool = False
    transactional_id: str | None = None


def produce(
    view: ClusterMetadata,
    topic: str,
    batches: Mapping[int, bytes],
    options: ProduceOptions,
    places: Mapping[int, Sequence[int]] | None = None,
) -> Operation[list[Produced]]:
    """Append one batch to each of these partitions, side by side; where each went.

    With ``places``, as :class:`Outgoing` has them, a batch that is too large is split, and its
    parts are listed one by one. Raises RecordTooLarge for a record that is so alone, once all other
    partitions are written; without ``places`` MessageTooLarge or RecordListTooLarge. The cause of
    another error is an Unwritten, with ``places``.
    """
    waiting = {partition: [batch] for partition, batch in batches.items()}  # the next one is last
    done: list[Produced] = []
    written = dict.fromkeys(batches, 0)
    refused: dict[int, KeptError] = {}
    most_bytes = max(map(len, batches.values()), default=0)
    if places is not None:
        most_bytes = min(most_bytes, view.batch_limits.get(topic, most_bytes))
    while waiting:
        calls = []
        for partition, parts in waiting.items():
            _split_above(parts, most_bytes)
            tp = TopicPartition(topic, partition)
            calls.append(_produce_call(view, tp, parts[-1], options, places is not None))
        try:
            responses = yield calls
        except KeptError as failed:
            if places is None:
                raise
            left = [*waiting, *refused]
            known = len(calls) == 1 and options.acks != 0 and _had_no_effect(calls[0], failed)
            rest = sorted(chain(*(places[p][written[p] :] for p in left))) if known else None
            raise failed from Unwritten(rest)
        for (partition, parts), response in zip(list(waiting.items()), responses, strict=True):
            batch = parts[-1]
            count = read_header(batch).record_count
            error = response and _refusal(TopicPartition(topic, partition), response)
            if error is None:
                parts.pop()
                written[partition] += count
                done.append(_produced(partition, response))
            elif count > 1:
                most_bytes = view.batch_limits[topic] = min(most_bytes, len(batch) - 1)
            else:
                refused[partition] = error
            if not parts or partition in refused:
                del waiting[partition]
    if refused:
        assert places is not None
        rests = {p: places[p][written[p] :] for p in refused}
        first = min(refused, key=lambda partition: rests[partition][0])
        raise RecordTooLarge(str(refused[first]), sorted(chain(*rests.values())))
    return done


def _had_no_effect(call: Call, error: KeptError) -> bool:
    """Whether it is known that no try of a call that ended with this error had an effect."""
    refused = isinstance(error, (PeerError, *NOT_EXECUTED))
    # A connection that broke under the request, perhaps; UNKNOWN_SERVER_ERROR.
    unclear = isinstance(error, (AuthenticationFailed, NotKafka, BrokerError))
    return refused and not unclear and not call.may_have_effect


def _split_above(parts: list[bytes], limit_bytes: int) -> None:
    """Split the last of these batches until its first part is no larger, or one record."""
    while len(parts[-1]) > limit_bytes and (count := read_header(parts[-1]).record_count) > 1:
        batch = parts.pop()
        rows = list(records(batch))
        parts += [_part(batch, rows, count // 2, count), _part(batch, rows, 0, count // 2)]


def _part(batch: bytes, rows: Sequence[Record], first: int, end: int) -> bytes:
    """Some records of a batch as a batch of the same producer, whose next sequences they have."""
    header = read_header(batch)
    base = header.base_sequence
    return build_batch(
        [(r.timestamp, r.key, r.value, r.headers) for r in rows[first:end]],
        codec=header.codec,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=base if base == NO_SEQUENCE else base + first & MAX_INT32,
        is_transactional=header.is_transactional,
    )


def _produced(partition: int, response: Any) -> Produced:
    if response is None:
        return Produced(partition, -1)
    outcome = response.responses[0].partition_responses[0]
    stamped = outcome.log_append_time
    at_ms = None if stamped is None else round(stamped.timestamp() * 1000)
    return Produced(partition, int(outcome.base_offset), at_ms)


def _produce_call(
    view: ClusterMetadata, tp: TopicPartition, batch: bytes, options: ProduceOptions, splits: bool
) -> Call:
    def values(version: int) -> Mapping[str, Any]:
        del version
        data = {"index": tp.partition, "records": batch}
        named = {"name": tp.topic, "topic_id": view.topic_id(tp.topic), "partition_data": [data]}
        return {
            "transactional_id": options.transactional_id,
            "acks": options.acks,
            "timeout": options.timeout_ms,
            "topic_data": [named],
        }

    def check(response: Any) -> KeptError | None:
        error = _refusal(tp, response)
        return None if splits and isinstance(error, _TOO_LARGE) else error

    return Call(
        ApiKey.PRODUCE,
        values,
        ToLeader(*tp, options.auto_create),
        what=_what(tp),
        timeout_ms=options.timeout_ms,
        check=check,
        repeatable=not options.at_most_once,
        at_most_once=options.at_most_once,
        expects_response=options.acks != 0,
        max_version=32767 if options.transactional_id is None else _NO_TRANSACTIONS_V2,
    )


def _what(tp: TopicPartition) -> str:
    return f"Produce to {tp.place}"


def _refusal(tp: TopicPartition, response: Any) -> KeptError | None:
    """Why a leader has not appended a batch; None where it has."""
    partition = response.responses[0].partition_responses[0]
    message = getattr(partition, "error_message", None)
    details = [
        e.batch_index_error_message
        for e in getattr(partition, "record_errors", ())
        if e.batch_index_error_message
    ]
    if details and details[0] not in (message or ""):
        message = f"{message or 'a record is refused'}: {details[0]}"
    error = failure(int(partition.error_code), _what(tp), message)
    if isinstance(error, NOT_EXECUTED) and partition.base_offset >= 0:
        return AppendUncertain(
            f"{error}: it was appended there at offset {partition.base_offset}, and may have been "
            "written"
        )
    if isinstance(error, RequestTimedOut):
        return RequestTimedOut(
            f"{error}: the leader has it, not every replica in sync has; it is committed later "
            "unless the leader is lost"
        )
    return error


def init_producer_id(
    timeout_ms: int,
    transactional_id: str | None = None,
    transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS,
    current: tuple[int, int] = (-1, -1),
) -> Operation[tuple[int, int]]:
    """(producer id, producer epoch) for an idempotent producer, or for one of an id: that fences
    the id's producers before, and aborts their transaction. Given what a producer has as
    ``current``, its next epoch: ProducerFenced where it is not the newest any more (KIP-360).
    """
    route: Route = Anywhere()
    what = "InitProducerId"
    if transactional_id is not None:
        route, what = ToCoordinator(transactional_id, kind=1), f"{what} of {transactional_id}"
    values = {
        "transactional_id": transactional_id,
        "transaction_timeout": transaction_timeout_ms,
        "producer_id": current[0],
        "producer_epoch": current[1],
    }
    (response,) = yield [
        Call(
            ApiKey.INIT_PRODUCER_ID,
            values,
            route,
            what=what,
            timeout_ms=timeout_ms,
            check=lambda r: failure(int(r.error_code), what, key=transactional_id or ""),
        )
    ]
    return int(response.producer_id), int(response.producer_epoch)
