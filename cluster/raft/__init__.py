"""Raft: the log that the voters agree on, as a pure core (Tick, Step, Propose, Ready, Advance).

===================  ===============================================================================
:mod:`.messages`     what the nodes say to each other
:mod:`.ready`        what the core hands to its shell, roles, settings
:mod:`.log`          the entries, and how many of them are durable
:mod:`.membership`   who votes
:mod:`.state`        what the parts of the core share: term, vote, role, what is to be sent
:mod:`.election`     pre-vote, vote, leases, evidence that a leader died
:mod:`.progress`     what a leader knows of one follower
:mod:`.leading`      replication, commit, read barriers, transfer, membership changes, observers
:mod:`.following`    appends and snapshots from the leader, and finding one
:mod:`.core`         the state machine made of these
===================  ===============================================================================
"""
