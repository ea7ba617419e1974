"""The group coordinator: consumer groups of the classic protocol, kept in ``__consumer_offsets``.

=================  =================================================================================
:mod:`.records`    Kafka's record formats, and which partition a group lives in
:mod:`.events`     what happens to a core, and what it wants done
:mod:`.group`      one group and its members
:mod:`.membership` joining, syncing, heartbeats, leaving
:mod:`.offsets`    committed offsets of a partition's groups
:mod:`.core`       the state machine of one partition: ``step(event) -> effects``
:mod:`.coordinator` the shell: loads partitions, appends records, runs timers, answers
=================  =================================================================================

The behaviour is that of Apache Kafka 4.3 (``GroupMetadataManager``, ``ClassicGroup``,
``OffsetMetadataManager``); each module says where we differ.
"""
