"""From options to offsets: asks the cluster which partitions there are, from where to where.

What cannot be is refused here, on the driver, before a task runs: unknown topics and partitions,
offsets that are not in the log, timestamps after the last record.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.consume.range_reader import UNKNOWN_TOPIC_OR_PARTITION
from kept.client.core.broker_errors import failure
from kept.pipeline.connection import BadOption
from kept.pipeline.options import (
    Assign,
    AtOffsets,
    ReadOptions,
    Subscribe,
    Where,
)
from kept.storage.errors import UnknownTopicOrPartition
from kept.storage.types import IsolationLevel, TopicPartition

if TYPE_CHECKING:
    from kept.client.client import Client
    from kept.client.core.metadata import TopicMetadata
    from kept.pipeline.options import Topics

Offsets = dict[TopicPartition, int]


def find_partitions(
    client: Client, topics: Topics, *, all_must_be_there: bool = True
) -> list[TopicPartition]:
    """The partitions to read, sorted; a pattern may match nothing.

    Raises UnknownTopicOrPartition where a topic or partition that is named is not there, or leaves
    it out. The topics are in ``client.view`` then. A pattern matches no internal topics, as in
    Kafka: what groups have committed is nobody's data.
    """
    if isinstance(topics, Subscribe | Assign):
        names = topics.topics if isinstance(topics, Subscribe) else _topics(topics.partitions)
        view = client.metadata(sorted(names))
        if not all_must_be_there:
            names = tuple(n for n in names if not _is_gone(view.topics.get(n)))
        for name in names:
            _known(client, name)
        there = {TopicPartition(n, p) for n in names for p in view.topics[n].partitions}
        if isinstance(topics, Subscribe):
            return sorted(there)
        for tp in topics.partitions if all_must_be_there else ():
            if tp not in there:
                count = len(view.topics[tp.topic].partitions)
                raise UnknownTopicOrPartition(
                    f"assign: {tp.topic} has {count} partitions, there is no partition "
                    f"{tp.partition}"
                )
        return [tp for tp in topics.partitions if tp in there]
    view = client.metadata(None)
    return sorted(
        TopicPartition(name, p)
        for name, topic in view.topics.items()
        if re.fullmatch(topics.pattern, name) and not (topic.error_code or topic.internal)
        for p in topic.partitions
    )


def _topics(tps: Iterable[TopicPartition]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tp.topic for tp in tps))


def still_there(client: Client, tps: Iterable[TopicPartition]) -> set[TopicPartition]:
    """Those of them that have not been deleted."""
    remaining = list(tps)
    topics = client.metadata(sorted({tp.topic for tp in remaining})).topics if remaining else {}
    present = set()
    for tp in remaining:
        topic = topics.get(tp.topic)
        if topic is None or _is_gone(topic):
            continue
        if topic.error_code or tp.partition in topic.partitions:
            present.add(tp)
    return present


def _is_gone(topic: TopicMetadata | None) -> bool:
    return topic is None or topic.error_code == UNKNOWN_TOPIC_OR_PARTITION


def _known(client: Client, name: str) -> None:
    topic = client.view.topics.get(name)
    code = UNKNOWN_TOPIC_OR_PARTITION if topic is None else topic.error_code
    if code == UNKNOWN_TOPIC_OR_PARTITION:
        close = difflib.get_close_matches(name, client.metadata(None).topics, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UnknownTopicOrPartition(f"{client.bootstrap} has no topic {name}{hint}")
    error = failure(code, f"Metadata of {name}")
    if error is not None:
        raise error


def check_replica(client: Client, tps: Iterable[TopicPartition], node: int) -> None:
    """Refuse partitions that have no replica in sync on a node. Raises BadOption."""
    for tp in tps:
        isr = client.topic(tp.topic).partitions[tp.partition].isr
        if node not in isr:
            there = ", ".join(map(str, sorted(isr))) or "none"
            raise BadOption(
                f"replica: {tp.place} is not in sync on node {node}; in sync are {there}"
            )


def topic_ids(client: Client, tps: Iterable[TopicPartition]) -> dict[str, str | None]:
    """Topic -> its id in hexadecimal, None where the broker has none."""
    ids = {}
    for name in _topics(tps):
        topic_id = client.topic(name).topic_id
        ids[name] = topic_id.hex if topic_id is not None and topic_id.int else None
    return ids


def all_at(
    client: Client,
    tps: Iterable[TopicPartition],
    when: int,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> Offsets:
    """EARLIEST, LATEST or the first offset at or after a timestamp (-1: none) of each partition."""
    answers = client.list_offsets(dict.fromkeys(tps, when), isolation)
    return {tp: answer.offset for tp, answer in answers.items()}


def starts(client: Client, tps: list[TopicPartition], options: ReadOptions) -> Offsets:
    """Where a read of these partitions begins."""
    return _resolve(client, tps, options.starting, options, ending=False)


def ends(client: Client, tps: list[TopicPartition], options: ReadOptions) -> Offsets:
    """Where a batch read of these partitions ends."""
    where = options.ending or AtOffsets("endingOffsets", LATEST)
    return _resolve(client, tps, where, options, ending=True)


def _resolve(
    client: Client, tps: list[TopicPartition], where: Where, options: ReadOptions, *, ending: bool
) -> Offsets:
    if isinstance(where, AtOffsets) and where.default is not None:
        return all_at(client, tps, where.default, options.isolation)
    if isinstance(where, AtOffsets):
        given = _for_each(where.option, where.by_partition or {}, tps)
        return _explicit(client, where.option, given, options, ending=ending)
    wanted = where.by_partition
    if wanted is None:
        assert where.default is not None
        positions = dict.fromkeys(tps, where.default)
    else:
        positions = _for_each(where.option, wanted, tps)
    offsets = {
        tp: at.offset for tp, at in client.list_offsets(positions, options.isolation).items()
    }
    none = [tp for tp, offset in offsets.items() if offset < 0]
    if none and not ending and not options.no_match_is_latest:
        raise BadOption(
            f"{where.option}: {none[0].place} has no record at or after {positions[none[0]]} ms "
            "(startingOffsetsByTimestampStrategy=latest begins at its end then)"
        )
    offsets.update(all_at(client, none, LATEST, options.isolation))
    return offsets


def _for_each(
    option: str, given: Mapping[TopicPartition, int], tps: list[TopicPartition]
) -> Offsets:
    read = set(tps)
    missing = [tp for tp in tps if tp not in given]
    strange = [tp for tp in given if tp not in read]
    if missing:
        names = ", ".join(tp.place for tp in missing[:3])
        raise BadOption(f"{option} does not name {names}, which is read")
    if strange:
        names = ", ".join(tp.place for tp in strange[:3])
        raise BadOption(f"{option} names {names}, which is not read")
    return dict(given)


def _explicit(
    client: Client, option: str, given: Offsets, options: ReadOptions, *, ending: bool
) -> Offsets:
    """Offsets that somebody wrote down, each checked against its log. A read of what is committed
    may begin where nothing is committed yet; it cannot end there.
    """
    first = all_at(client, given, EARLIEST)
    stable = all_at(client, given, LATEST, options.isolation)
    last = stable if ending else all_at(client, given, LATEST)
    offsets = {}
    for tp, offset in given.items():
        if offset < 0:
            offsets[tp] = first[tp] if offset == EARLIEST else stable[tp]
            continue
        offsets[tp] = min(max(offset, first[tp]), last[tp])
        if offsets[tp] != offset and options.fail_on_data_loss:
            raise BadOption(
                f"{option}: {tp.place} has offsets {first[tp]} to {last[tp]}, {offset} is out of "
                "range (failOnDataLoss=false takes the nearest)"
            )
    return offsets
