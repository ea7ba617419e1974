"""The group coordinator: consumer groups of the classic protocol, kept in ``__consumer_offsets``.

========================  =========================================================================
:mod:`.records`           Kafka's record formats
:mod:`.events`            what happens to a core, what it wants done, what it answers
:mod:`.timers`            its deadlines
:mod:`.group`             one group and its members
:mod:`.join_group`        joining, syncing, heartbeats, leaving
:mod:`.offsets`           committed offsets of a partition's groups
:mod:`.offset_requests`   committing, fetching, deleting, expiring them
:mod:`.core`              the state machine of one partition: ``step(event) -> effects``
:mod:`.pending_append`    appends that are not committed yet, and what follows
:mod:`.coordinator`       what its shards do that others don't, and queries over all of them
:mod:`.memory_limit`      what groups hold in memory, and its limit
========================  =========================================================================

The behaviour is that of Apache Kafka 4.3 (``GroupMetadataManager``, ``ClassicGroup``,
``OffsetMetadataManager``); each module says where we differ.
"""
