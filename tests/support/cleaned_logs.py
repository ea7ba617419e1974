"""A log of a lone node that is filled, cleaned and read."""

from __future__ import annotations

import asyncio
import time

from kept.storage.records import build_batch, check, records
from kept.storage.types import TopicPartition

TP = TopicPartition("t", 0)
WAIT_S = 60


def filled(lone):
    """A log of several segments with 40 records of 3 keys."""
    lone.create("t", cleanup_policy="compact", segment_bytes="1024")
    hosted = lone.node.parts.table.replicas[TP]
    now = int(time.time() * 1000)
    for i in range(40):
        batch = build_batch([(now, b"k%d" % (i % 3), b"%d" % i * 20, ())])
        hosted.partition.append(check(bytearray(batch), hosted.rules, now), now)
        hosted.partition.write()
    return hosted


def newest(hosted):
    """The newest value of each key."""
    log, found = hosted.partition.log, {}
    offset = log.log_start_offset
    while data := log.read_batches(offset, 1 << 20, log.log_end_offset):
        for record in records(data):
            found[record.key] = record.value
            offset = record.offset + 1
    return found


def clean(lone):
    async def go():
        return await asyncio.wait_for(lone.node.parts.cleaner.started.request(TP), WAIT_S)

    return lone.run(go())
