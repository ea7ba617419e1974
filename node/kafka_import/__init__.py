"""Moving in: ``kept serve --adopt`` on the data directories of an Apache Kafka node (KRaft).

What Kafka keeps of topics, settings, brokers and producer ids is in its metadata log, which is a
Raft log. It is translated entry by entry, with its terms and its indexes, so that kept's Raft goes
on where Kafka's stopped: ``docs/adr/0007-adopting-continues-kafkas-raft.md``. The partitions' logs
are opened as they are. Kafka's own files of metadata are only read.

============================  ====================================================================
:mod:`.kafka_records`         Kafka's metadata records: bytes to dataclasses (pure)
:mod:`.translate`             those to kept's metadata records (pure)
:mod:`.adopted_metadata`      ``__cluster_metadata-0``: checkpoint, segments, who voted
:mod:`.directories`           the log directories: what is refused, and the mark
:mod:`.adopt`                 all of it, in an order that a crash cannot harm
============================  ====================================================================
"""
