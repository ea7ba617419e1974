"""Raft: the log that the voters agree on, as a pure core (Tick, Step, Propose, Ready, Advance).

=====================  =============================================================================
:mod:`.messages`       what the nodes send to each other
:mod:`.message_guard`  which messages are dropped before they change anything
:mod:`.ready`          what the core returns to its shell, roles, settings
:mod:`.log`            the entries, and how many of them are durable
:mod:`.voter_set`      who votes
:mod:`.progress`       what a leader knows of one follower
:mod:`.state`          the one state that the parts below share: term, vote, role, messages to send
:mod:`.replicator`     the leader: replication, commit, read barriers, transfer, changes of voters
:mod:`.elector`        pre-vote, vote, leases, evidence that a leader died
:mod:`.follower`       appends and snapshots from the leader
:mod:`.observer`       finding the leader, and whose messages count
:mod:`.core`           the state machine that is made of these parts
:mod:`.formation`      the founders of a new cluster find each other
=====================  =============================================================================

What the shell owes the core (:class:`kept.cluster.metadata.metadata_node.MetadataNode` pays the
first four):

1. **Persist, then send.** ``ready()`` gives a :class:`~.ready.Ready`; write its hard state, its
   snapshot, then cut and append, all durable; then send its messages, and ``advance``. Until then
   no other Ready is given. What a message promises (a vote, a term, "I have these entries") is on
   disk before it leaves. An error while writing: nothing is sent, nothing advanced; write it again,
   or stop. ``resign()`` lets another node lead meanwhile.
2. ``drain_messages()`` gives what promises nothing that is not on disk: it may leave at any time,
   above all while a Ready is being written. Whoever never calls it gets the same messages with
   the next Ready; then a disk that stalls for an election timeout costs the leadership.
3. **Apply** the entries up to ``committed_to``, in order, each once; ``take_snapshot`` is asked for
   the state after the last one applied, and must be able to give it.
4. ``compact(index)`` once a durable snapshot holds the entries up to there. At a restart the core
   is made of what is on disk: hard state, voters and index of the snapshot, entries.
5. ``tick()`` at a steady pace. Time is counted in ticks alone: a node that was stopped and wakes
   believes for a moment what it believed before. So a leader's belief is worth nothing: an entry
   counts when it is committed, a read when its barrier is confirmed.
6. Every message that arrives goes into ``step``, whoever sent it. Messages may be lost, late,
   twice, and out of order. They come from nodes of this cluster that speak for themselves, which
   the transport checks. ``sender`` and ``directory_id`` are believed.
7. ``peer_down(node)`` reports that a process died, on evidence: its connections broke and a probe
   was refused. Wrong evidence costs messages, at worst an election; never data. ``state.to_probe``
   names nodes that a peer reports dead: probe them, too.
8. ``random(n)`` differs between nodes: equal ones campaign at the same moment for ever.

What the core promises in return: Raft's five properties (figure 3 of the paper), for any behaviour
of network and processes, and of disks that keep what they synced. And with a majority of the voters
up, talking, and no slower than the election timeout: a leader, and commits.

The shape (tick, step, propose, ready, advance) is that of etcd's RawNode, not of
:mod:`kept.state_machine`: docs/adr/0011-raft-as-rawnode.md gives the reasons.

After Ongaro's thesis and etcd's raft, of which we take the shape. Ours: membership counts from the
log as in the thesis (etcd: when applied); voters are (node, disk); evidence; observers come and
go without an entry in the log; messages that promise nothing do not wait for the disk.
"""
