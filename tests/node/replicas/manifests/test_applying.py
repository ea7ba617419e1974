"""What the shell of a replica's manifests makes of an apply that cannot be done."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest

from kept.compaction.manifest.apply import CompactionState
from kept.node.replicas.manifests.errors import ManifestUnreadable
from kept.node.replicas.manifests.replica import ReplicaManifests
from kept.node.replicas.manifests.store import ManifestFiles
from kept.node.replicas.manifests.workers import ManifestWork
from kept.replication import manifests_events as ev
from kept.replication.manifests_events import ManifestRef
from kept.storage.errors import NotLeaderOrFollower
from kept.storage.types import Generation
from tests.support.replicas import local_replica, manifest, manifest_context

OLDER: Final = ManifestRef(Generation(1, 5), 100)
NEWER: Final = ManifestRef(Generation(1, 6), 120)
NEXT: Final = ManifestRef(Generation(2, 6), 140)


class Telling(ReplicaManifests):
    """Writes down what its core is told."""

    __slots__ = ("told",)

    def step(self, event: Any) -> None:
        self.told.append(event)


@pytest.fixture
def replica() -> Telling:
    """One whose files of every manifest are gone."""

    async def apply(*_: Any) -> None:
        raise ManifestUnreadable("no manifest 1.5")

    found = Telling(manifest_context([]), local_replica())
    found.told = []
    found._opened_files = ManifestFiles(found._context, found._hosted)
    found._opened_files.apply = apply  # type: ignore[method-assign,assignment]
    return found


def test_a_manifest_that_was_replaced_while_it_waited_is_no_failure(replica) -> None:
    replica.core.held = replica.core.leader_published = NEWER
    asyncio.run(replica._apply(OLDER, ManifestWork()))
    assert replica.told == [ev.ApplyAborted(OLDER, None), ev.RetryTriggered()]
    assert (replica.retry_schedule.count, replica.retry_schedule.reason) == (0, "")


def test_a_manifest_whose_file_is_gone_is_asked_for_again(replica) -> None:
    replica.core.held = NEWER
    replica.core.leader_published = OLDER
    asyncio.run(replica._apply(OLDER, ManifestWork()))
    assert replica.told == [ev.ApplyAborted(OLDER, None), ev.ManifestDamaged(OLDER)]
    assert (replica.retry_schedule.count, replica.retry_schedule.reason) == (0, "")


def test_a_pass_of_a_leader_that_follows_now_does_not_take_what_came_from_the_next(replica) -> None:
    """Else what came is stored without its body, and that is called a failure."""
    came = object()

    async def read_pass_manifest(_: Any) -> Any:
        return manifest(Generation(1, 6), 120)

    files = replica._opened_files
    files.read_pass_manifest, files.bodies = read_pass_manifest, {NEXT: came}

    async def go() -> None:
        replica._context.runtime.loop = asyncio.get_running_loop()
        doing = asyncio.ensure_future(replica.pass_completed(None, 1, OLDER, 0))
        await asyncio.sleep(0)
        while not replica.told:
            await asyncio.sleep(0)
        replica._discarded(NEWER)
        with pytest.raises(NotLeaderOrFollower):
            await doing

    asyncio.run(go())
    assert replica.told == [ev.PassCompleted(NEWER, 1, OLDER)]
    assert replica._opened_files.bodies == {NEXT: came}


@pytest.mark.parametrize(
    ("change", "is_wanted"),
    [
        (None, True),
        (("making_base", False), False),
        (("leader_epoch", 4), False),
        (("_closed", True), False),
    ],
)
def test_a_base_is_told_of_while_the_leader_of_its_epoch_makes_it(replica, change, is_wanted):
    replica.core.making_base, replica.core.leader_epoch = True, 3

    async def create_base(_: Any, name: Generation, still_wanted: Any) -> CompactionState:
        assert name == Generation(3, 0) and still_wanted()
        if change is not None:
            setattr(replica if change[0] == "_closed" else replica.core, *change)
        assert still_wanted() is is_wanted
        return CompactionState(name)

    replica._opened_files.create_base = create_base
    asyncio.run(replica._make_base(ev.CreateBaseGeneration(3, None), ManifestWork()))
    made = ev.BaseGenerationCreated(ManifestRef(Generation(3, 0), 0))
    assert replica.told == ([made] if is_wanted else [])
    assert replica._hosted.compaction == CompactionState(Generation(3, 0)), "it is in place"
