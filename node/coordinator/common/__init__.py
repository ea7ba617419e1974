"""What coordinators share whose state is kept in an internal topic, one core per partition.

========================  =========================================================================
:mod:`.partitioner`       which partition keeps a name
:mod:`.core`              the shape of a core: the state machine of one partition
:mod:`.events`            events and effects that every core has
:mod:`.timers`            deadlines of a core
:mod:`.shard`             the shell of a core: appends, timers, those who wait
:mod:`.log_loader`        a partition's log into a core
:mod:`.shards`            all shards of the node: which partitions it leads
:mod:`.leadership_check`  whether this node may still say what a partition keeps
========================  =========================================================================

A coordinator is a :class:`~.shard.CoordinatorKind`, which has :class:`~.shards.Shards`.
"""
