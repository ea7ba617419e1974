"""The ranges of a batch read: asks the cluster, then decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kept.client.consume.positions import EARLIEST, LATEST
from kept.pipeline.connection import BadOption
from kept.pipeline.options import ReadOptions
from kept.pipeline.read import offsets
from kept.pipeline.read.plan import Range, ReadBounds, plan, split, split_by_bytes

if TYPE_CHECKING:
    from kept.client.client import Client


def plan_batch(client: Client, options: ReadOptions, bounds: ReadBounds) -> list[Range]:
    """The ranges to read, cut into as many tasks as asked for. Raises BadOption for a start that is
    after its end.
    """
    tps = offsets.find_partitions(client, options.topics)
    if options.replica is not None:
        offsets.check_replica(client, tps, options.replica)
    starts = offsets.starts(client, tps, options)
    ends = offsets.ends(client, tps, options)
    for tp in tps:
        if starts[tp] > ends[tp] and options.fail_on_data_loss:
            raise BadOption(
                f"{tp.place}: the read starts at {starts[tp]}, after its end at {ends[tp]}"
            )
    admitted = [tp for tp in tps if bounds.admits(tp)]
    if (since := bounds.min_timestamp) > 0:  # brokers look for no earlier one, logs may have it
        for tp, first in offsets.all_at(client, admitted, since, options.isolation).items():
            starts[tp] = max(starts[tp], first) if first >= 0 else ends[tp]
    ids = offsets.topic_ids(client, tps)
    ranges = plan(starts, {tp: ends[tp] for tp in admitted}, ids, bounds)
    return divide(client, ranges, options)


def divide(client: Client, ranges: list[Range], options: ReadOptions) -> list[Range]:
    """Ranges cut into as many tasks as asked for.

    The bytes of a range are not known; they are reckoned from the size of the partition's log and
    the offsets in it.
    """
    most = options.max_bytes_per_partition
    if most is not None and ranges:
        sizes = {t: client.log_sizes(t) for t in {range_.topic for range_ in ranges}}
        tps = [range_.topic_partition for range_ in ranges]
        first, last = (offsets.all_at(client, tps, when) for when in (EARLIEST, LATEST))
        bytes_each = {
            tp: sizes[tp.topic].get(tp.partition, 0) / max(last[tp] - first[tp], 1) for tp in tps
        }
        ranges = split_by_bytes(ranges, bytes_each, most)
    return split(ranges, options.min_partitions, options.max_records_per_partition)
