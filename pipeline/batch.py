"""The ranges of a batch read: asks the cluster, then decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kept.pipeline import offsets
from kept.pipeline.options import BadOption, ReadOptions
from kept.pipeline.planning import MIN_INT64, Bounds, Range, plan, split

if TYPE_CHECKING:
    from kept.client.blocking import Client


def plan_batch(client: Client, options: ReadOptions, bounds: Bounds) -> list[Range]:
    """The ranges to read, cut into as many tasks as asked for."""
    tps = offsets.find_partitions(client, options.topics)
    starts = offsets.starts(client, tps, options)
    ends = offsets.ends(client, tps, options)
    for tp in tps:
        if starts[tp] > ends[tp] and options.fail_on_data_loss:
            raise BadOption(f"{tp}: the read starts at {starts[tp]}, after its end at {ends[tp]}")
    admitted = [tp for tp in tps if bounds.admits(tp)]
    if bounds.min_timestamp > MIN_INT64:
        since = max(bounds.min_timestamp, 0)
        for tp, first in offsets.all_at(client, admitted, since, options.isolation).items():
            starts[tp] = max(starts[tp], first) if first >= 0 else ends[tp]
    ids = offsets.topic_ids(client, tps)
    ranges = plan(starts, {tp: ends[tp] for tp in admitted}, ids, bounds)
    return split(ranges, options.min_partitions, options.max_records_per_partition)
