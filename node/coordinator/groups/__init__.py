"""The group coordinator: consumer groups of the classic protocol, kept in ``__consumer_offsets``.

========================  =========================================================================
:mod:`.records`           Kafka's record formats, and which partition a group lives in
:mod:`.events`            what happens to a core, what it wants done, what it answers
:mod:`.timers`            its deadlines
:mod:`.group`             one group and its members
:mod:`.join_group`        joining, syncing, heartbeats, leaving
:mod:`.offsets`           committed offsets of a partition's groups
:mod:`.offset_requests`   committing, fetching, deleting, expiring them
:mod:`.core`              the state machine of one partition: ``step(event) -> effects``
:mod:`.log_loader`        a partition's log into a core
:mod:`.shard`             the shell of one core: appends, timers, those who wait
:mod:`.coordinator`       all shards of the node
:mod:`.memory_limit`      what groups hold in memory, and its limit
:mod:`.leadership_check`  whether this node may still say what a group has committed
========================  =========================================================================

The behaviour is that of Apache Kafka 4.3 (``GroupMetadataManager``, ``ClassicGroup``,
``OffsetMetadataManager``); each module says where we differ.
"""
