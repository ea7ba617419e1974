"""Terms that no election reaches, snapshots that are none, and hints of strangers, at a member."""

from __future__ import annotations

from uuid import UUID

import pytest
from msgspec.structs import replace

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.metadata_node import MetadataNode
from kept.cluster.metadata.records import VotersRecord
from kept.cluster.metadata.snapshot import check_install, encode_snapshot
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import HardState, write_hard_state
from kept.cluster.raft.message_guard import MAX_TERM
from kept.cluster.raft.messages import InstallSnapshot, LeaderHint
from kept.storage.errors import DirectoryRefused
from tests.support.simulated_disk import SimulatedDisk

VOTERS = tuple(Voter(n, UUID(int=n + 1), f"n{n}", 1) for n in range(3))


def opened(disk: SimulatedDisk, **more) -> MetadataNode:
    return MetadataNode.open(
        "/meta",
        disk,
        node_id=0,
        directory_id=UUID(int=1),
        voters=VOTERS,
        random=lambda n: 0,
        **more,
    )


@pytest.mark.parametrize("term", [MAX_TERM + 1, 2**63 - 1])
def test_a_node_in_an_impossible_term_says_so_at_its_start(term: int) -> None:
    disk = SimulatedDisk()
    opened(disk)
    write_hard_state(disk, "/meta", HardState(term))
    with pytest.raises(DirectoryRefused, match=f"/meta: .* is in term {term}, which no election"):
        opened(disk)
    write_hard_state(disk, "/meta", HardState(MAX_TERM))
    assert opened(disk).term == MAX_TERM


def hint(sender: int, **more) -> LeaderHint:
    return LeaderHint(
        term=0,
        sender=sender,
        to=0,
        directory_id=UUID(int=sender + 1),
        **{"leader_id": -1, "last_index": 0, **more},
    )


def test_a_stranger_ends_no_founder_and_keeps_none_from_founding() -> None:
    member = opened(SimulatedDisk(), cluster_id="mine")
    member.receive(hint(9, cluster_id="other", last_index=5, voters=(9,)))
    assert member.refusal is None
    for sender in (1, 2):
        member.receive(hint(sender, voters=(0, 1, 2)))
    assert [voter.node_id for voter in member.voters] == [0, 1, 2] and member.core.state.formed


def test_a_listed_node_of_another_cluster_is_still_refused() -> None:
    member = opened(SimulatedDisk(), cluster_id="mine")
    member.receive(hint(1, cluster_id="other", last_index=5, voters=(0, 1, 2)))
    assert "belongs to cluster other" in (member.refusal or "")


def test_a_snapshot_is_read_before_it_replaces_anything() -> None:
    image, _ = Image().apply([VotersRecord(VOTERS)])
    data = encode_snapshot(image, 3)
    good = InstallSnapshot(
        term=3, sender=1, to=0, last_index=image.index, last_term=3, image_bytes=data, voters=VOTERS
    )
    assert check_install(good) == ""
    assert "CRC" in check_install(replace(good, image_bytes=data[:-1] + b"x"))
    assert check_install(replace(good, image_bytes=b""))
    assert "of entry" in check_install(replace(good, last_index=image.index + 1))
    assert "of term 3" in check_install(replace(good, last_term=2))
    assert "other voters" in check_install(replace(good, voters=VOTERS[:1]))
