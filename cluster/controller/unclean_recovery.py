"""What an acknowledgement is worth when processes die without their clean mark: rule 33. Pure.

**Eligible leader replicas (ELR).** A broker that the controller takes out of an ISR (fenced,
registered anew, shut down) enters the partition's ELR, and so does the last member when it restarts
without its clean mark. If all of the ISR died together, the controller learns of it one by one; the
first to go may be the only one whose page cache survived. A member of the ISR that did not restart
leads, and the ELR does not matter: it is cleared (:func:`clear_elr`) when that leader sends a
heartbeat after it applied the entry that filled the ELR, and by any ISR change that it requests.

**Election by length.** When the last member of an ISR restarts unclean and the ELR has others,
nobody leads (``PartitionRecord.recovering``). All members of the ELR report how far their logs go
(:class:`~kept.cluster.controller.heartbeats.ReplicaLog`, with the broker epoch of now); when every
one has, the largest (last epoch, log end offset) leads, since it has all that any of them has below
its high watermark. If it was not in the ISR any more it may lack what was compacted since, and is
marked unclean: it begins with a base generation (rule 19), though no record is lost. While one is
missing the partition stays offline and :func:`missing_candidates` names it; only ``elect
--unclean`` (:func:`kept.cluster.controller.partition_election.elect_unclean`) goes on without it,
or, where the topic allows unclean election, the end of ``kept.unclean.recovery.wait.ms``.

KIP-966 keeps "eligible leader replicas" for the same end; it drops an unclean one at once, and so
loses what all of an ISR had in memory even if a member kept it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from kept.cluster.controller.heartbeats import PartitionKey, ReplicaLog
from kept.cluster.metadata.image import Delta, Image
from kept.cluster.metadata.records import NO_LEADER, MetadataRecord, PartitionRecord

Reports = Mapping[PartitionKey, Mapping[int, tuple[int, ReplicaLog]]]
"""Partition -> broker -> (broker epoch of the report, the report)."""


def candidates(state: PartitionRecord) -> tuple[int, ...]:
    """The ELR and the ISR, in replica order: the replicas that must report."""
    return tuple(b for b in state.replicas if b in state.elr or b in state.isr)


def partitions_awaiting(image: Image, broker_id: int) -> tuple[PartitionRecord, ...]:
    """The partitions that wait for this broker's report, in order of their keys."""
    partitions: list[PartitionRecord] = []
    for topic_id, number in image.recovering:
        state = image.partition(topic_id, number)
        if state is not None and broker_id in candidates(state):
            partitions.append(state)
    return tuple(sorted(partitions, key=lambda state: state.key))


def current_reports(
    image: Image, state: PartitionRecord, reports: Reports
) -> dict[int, ReplicaLog]:
    """The reports that count: of live candidates, of their present process and of this term."""
    known = reports.get(state.key, {})
    valid: dict[int, ReplicaLog] = {}
    for broker_id in state.replicas:
        broker = image.brokers.get(broker_id)
        broker_epoch, log = known.get(broker_id, (-1, None))
        if (
            log is not None
            and broker is not None
            and broker.active
            and broker.broker_epoch == broker_epoch
            and log.leader_epoch == state.leader_epoch
        ):
            valid[broker_id] = log
    return valid


def missing_candidates(image: Image, state: PartitionRecord, reports: Reports) -> tuple[int, ...]:
    """The candidates that have not reported yet."""
    have = current_reports(image, state, reports)
    return tuple(broker_id for broker_id in candidates(state) if broker_id not in have)


def longest_log(state: PartitionRecord, logs: Mapping[int, ReplicaLog]) -> int:
    """Whose log is the longest; of equal ones a member of the ISR, which needs no base generation,
    then the first in replica order. NO_LEADER of none.
    """
    best = NO_LEADER
    for broker_id in sorted(state.replicas, key=lambda broker_id: broker_id not in state.isr):
        if broker_id in logs and (best == NO_LEADER or logs[broker_id].length > logs[best].length):
            best = broker_id
    return best


def elect_longest(
    image: Image, keys: Iterable[PartitionKey], reports: Reports, *, incomplete: bool = False
) -> list[MetadataRecord]:
    """Elect by length where all candidates have reported.

    With ``incomplete`` those that are missing are given up: an unclean election. What is not
    recovering (any more), or has no report, is left alone.
    """
    records: list[MetadataRecord] = []
    for key in keys:
        state = image.partition(*key)
        if state is None or not state.recovering:
            continue
        logs = current_reports(image, state, reports)
        complete = all(broker_id in logs for broker_id in candidates(state))
        if complete:
            logs = {b: log for b, log in logs.items() if b in candidates(state)}
        leader = longest_log(state, logs)
        if leader == NO_LEADER or not (complete or incomplete):
            continue
        records.append(
            replace(
                state,
                leader=leader,
                isr=(leader,),
                elr=(),
                unclean=state.unclean or not complete or leader not in state.isr,
                leader_epoch=state.leader_epoch + 1,
                partition_epoch=state.partition_epoch + 1,
            )
        )
    return records


def clear_elr(image: Image, known: Mapping[PartitionKey, int]) -> list[MetadataRecord]:
    """Clear the ELR of partitions. ``known``: partition -> the partition epoch in which its leader
    was heard; a partition whose epoch is another one by now is left alone.
    """
    records: list[MetadataRecord] = []
    for key, partition_epoch in known.items():
        state = image.partition(*key)
        if (
            state is not None
            and state.elr
            and state.leader != NO_LEADER
            and state.partition_epoch == partition_epoch
        ):
            records.append(replace(state, elr=(), partition_epoch=partition_epoch + 1))
    return records


class UncleanElection(Struct, frozen=True):
    """What an unclean election gave up, as far as it is known.

    ``isr``: who was in sync before. ``logs``: (broker, last epoch, log end offset) as reported;
    acknowledged records between the leader's and the largest of these are lost, and whatever the
    silent members of ``isr`` had beyond it.
    """

    topic: str
    partition: int
    leader: int
    leader_epoch: int
    isr: tuple[int, ...]
    logs: tuple[tuple[int, int, int], ...]

    def __str__(self) -> str:
        known = ", ".join(f"{b}: offset {end} of epoch {epoch}" for b, epoch, end in self.logs)
        return (
            f"{self.topic}-{self.partition}: elected {self.leader} in epoch {self.leader_epoch} "
            f"without all of the ISR {list(self.isr)}; acknowledged records may be lost "
            f"(log ends known: {known or 'none'})"
        )


def is_unclean(before: PartitionRecord, after: PartitionRecord) -> bool:
    """Whether ``after`` has a new leader that may lack what ``before`` had acknowledged, as far as
    the two tell: an election by length of all that were waited for looks like one, too.
    """
    if after.leader in (NO_LEADER, before.leader) or not after.unclean:
        return False
    return after.leader not in before.isr or before.recovering


def unclean_elections(
    image: Image, delta: Delta, reports: Reports | None = None
) -> tuple[UncleanElection, ...]:
    """The unclean elections among what an entry changed, which has led to ``image``."""
    elections: list[UncleanElection] = []
    for change in delta.partitions:
        before, after = change.before, change.after
        if before is None or not is_unclean(before, after):
            continue
        known = (reports or {}).get(before.key, {})
        if (
            before.recovering
            and not before.unclean
            and not missing_candidates(image, before, reports or {})
        ):
            continue  # by length, of all: it only begins with a base generation
        elections.append(
            UncleanElection(
                change.topic_partition.topic,
                before.partition,
                after.leader,
                after.leader_epoch,
                candidates(before) if before.recovering else before.isr,
                tuple(
                    (broker_id, log.last_epoch, log.log_end_offset)
                    for broker_id, (_, log) in sorted(known.items())
                ),
            )
        )
    return tuple(elections)
