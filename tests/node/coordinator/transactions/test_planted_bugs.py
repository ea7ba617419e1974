"""Each bug, planted into the core or the sender of markers, is found by a check that is named; and
without a bug nothing is found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kio.schema.errors import ErrorCode
from msgspec.structs import replace

from kept.node.coordinator.common.events import (
    AppendCommitted,
    AppendTimedOut,
    EndMarker,
    Response,
)
from kept.node.coordinator.transactions import events as ev
from kept.node.coordinator.transactions import markers as mk
from kept.node.coordinator.transactions import requests as rq
from kept.node.coordinator.transactions import transaction as txn
from kept.node.coordinator.transactions.core import TransactionCore
from kept.node.coordinator.transactions.records import TransactionMetadata, TransactionRecord
from kept.storage.errors import InvariantViolation
from kept.storage.types import NO_PRODUCER_ID
from tests.node.coordinator.transactions.histories import History
from tests.node.coordinator.transactions.world import Broken, Image, World
from tests.support.histories import commands

SEEDS = int(os.environ.get("KEPT_TRANSACTION_WORLDS", "80"))
SEEDS_FOR_A_BUG = 400
STEPS = 500
Plant = Callable[[pytest.MonkeyPatch], type[World]]
PLANTS: dict[str, tuple[Plant, str, int]] = {}


def planted(check: str, seed: int = 0) -> Callable[[Plant], Plant]:
    """Register a bug, the check that finds it (the beginning of what it says), and from which seed
    on it is looked for: of the rarest bugs just before the first that shows it.
    """

    def register(plant: Plant) -> Plant:
        PLANTS[plant.__name__] = (plant, check, seed)
        return plant

    return register


def world_with(core: type | None = None, sender: type | None = None, **changes: object) -> type:
    """A world with another core, or sender of markers."""
    classes = {"core_class": core, "sender_class": sender}
    return type("Planted", (World,), {k: v for k, v in classes.items() if v} | changes)


def test_nothing_is_found_without_a_bug() -> None:
    acknowledged = 0
    for seed in range(SEEDS):
        world = World(seed)
        try:
            world.run(STEPS)
        except (Broken, InvariantViolation) as error:
            raise AssertionError(f"seed {seed}") from error
        acknowledged += len(world.acknowledgements)
    assert acknowledged > SEEDS, "hardly a transaction ended"


@planted("I3")
def end_answered_before_it_is_committed(_: pytest.MonkeyPatch) -> type[World]:
    class Core(TransactionCore):
        def _append(self, changes, request=None, result=None, **more):
            if isinstance(request, ev.EndTransaction):
                self._effects.append(Response(request.request, result))
                request = None
            super()._append(changes, request, result, **more)

    return world_with(Core)


@planted("I[12]", seed=160)
def markers_before_the_end_is_committed(_: pytest.MonkeyPatch) -> type[World]:
    class Core(TransactionCore):
        def _append(self, changes, request=None, result=None, **more):
            super()._append(changes, request, result, **more)
            for metadata in changes.values():
                if metadata is not None and metadata.state.is_prepared and metadata.partitions:
                    marker = EndMarker(
                        metadata.producer_id,
                        metadata.epoch,
                        self.coordinator_epoch,
                        metadata.state is txn.PREPARE_COMMIT,
                        metadata.client_version,
                    )
                    self._effects.append(ev.WriteMarkers(0, marker, metadata.partitions))

    return world_with(Core)


@planted("I[1234]")
def loaded_beyond_the_high_watermark(_: pytest.MonkeyPatch) -> type[World]:
    return world_with(loads_what_is_not_committed=True)


@planted("I5")
def markers_forgotten_at_load(_: pytest.MonkeyPatch) -> type[World]:
    class Core(TransactionCore):
        def loaded(self, now_ms):
            effects = yield from super().loaded(now_ms)
            return tuple(e for e in effects if not isinstance(e, ev.WriteMarkers))

    return world_with(Core)


@planted("I3")
def late_append_forgotten(_: pytest.MonkeyPatch) -> type[World]:
    class Core(TransactionCore):
        def _append_timed_out(self, event: AppendTimedOut) -> None:
            super()._append_timed_out(event)
            pending = self.pending.get(event.append)
            if pending is None or pending.completes:
                return
            del self.pending[event.append]
            for name in pending.transitions:
                held = self.ids[name]
                held.pending = None
                self._count(name, held, held.committed)
                if held.committed is None:
                    del self.ids[name]
                self._unpark(held)

        def _append_committed(self, event: AppendCommitted) -> None:
            if event.append in self.pending:
                super()._append_committed(event)

    return world_with(Core)


@planted("I[124]")
def completed_with_the_first_marker(_: pytest.MonkeyPatch) -> type[World]:
    class Core(TransactionCore):
        def _markers_written(self, event: ev.MarkersWritten) -> None:
            name = self._ending.get((event.marker.producer_id, event.marker.epoch))
            if name is not None:
                super()._markers_written(replace(event, partitions=self.ids[name].unwritten))

    return world_with(Core)


@planted("I[14]")
def another_leader_counts_as_written(monkeypatch: pytest.MonkeyPatch) -> type[World]:
    monkeypatch.setattr(mk, "_WRITTEN", mk._WRITTEN | {ErrorCode.not_leader_or_follower})
    return World


@planted("I[14]")
def no_leader_counts_as_deleted(_: pytest.MonkeyPatch) -> type[World]:
    class Sender(mk.MarkerSender):
        def step(self, event, now_ms):
            if isinstance(event, mk.ImageChanged):
                image = Image({})
                image.leaders = {tp: p for tp, p in event.image.leaders.items() if p.leader >= 0}
                event = mk.ImageChanged(image)
            return super().step(event, now_ms)

    return world_with(sender=Sender)


@planted("I6")
def fence_without_a_further_epoch(monkeypatch: pytest.MonkeyPatch) -> type[World]:
    fence = txn.prepare_fence
    monkeypatch.setattr(
        txn,
        "prepare_fence",
        lambda before, **kw: replace(fence(before, **kw), epoch=before.epoch),
    )
    return World


@planted("epoch")
def fence_with_two_further_epochs(monkeypatch: pytest.MonkeyPatch) -> type[World]:
    fence = txn.prepare_fence
    monkeypatch.setattr(
        txn,
        "prepare_fence",
        lambda before, **kw: replace(fence(before, **kw), epoch=before.epoch + 2),
    )
    return World


@planted("I7")
def next_producer_id_lost_at_a_failover(_: pytest.MonkeyPatch) -> type[World]:
    class Core(TransactionCore):
        def replay(self, record: TransactionRecord) -> None:
            if record.metadata is not None:
                lost = replace(record.metadata, next_producer_id=NO_PRODUCER_ID)
                record = replace(record, metadata=lost)
            super().replay(record)

    return world_with(Core)


@planted("I1", seed=40)
def retry_of_an_end_ends_the_next(monkeypatch: pytest.MonkeyPatch) -> type[World]:
    decide = rq.decide_end

    def decide_end(event: ev.EndTransaction, present: TransactionMetadata | None, **kw):
        is_open = present is not None and present.state is txn.ONGOING
        if is_open and event.client_version and event.epoch == present.epoch - 1:
            event = replace(event, epoch=present.epoch)
        return decide(event, present, **kw)

    monkeypatch.setattr(rq, "decide_end", decide_end)
    return World


@planted("I[12]", seed=190)
def stale_connection_served(_: pytest.MonkeyPatch) -> type[World]:
    return world_with(closes_stale_connections=False)


@planted("I4")
def open_transaction_expires(monkeypatch: pytest.MonkeyPatch) -> type[World]:
    monkeypatch.setattr(txn, "is_idle", lambda _: True)
    return world_with(expiration_ms=1_000)


@planted("I8")
def timeouts_by_the_wall_clock(_: pytest.MonkeyPatch) -> type[World]:
    class Core(TransactionCore):
        def _abort_timed_out(self) -> None:
            for held in self.ids.values():
                if held.deadline_ms is not None and held.committed is not None:
                    began_ms = held.committed.start_ms - self.wall_offset_ms
                    held.deadline_ms = began_ms + held.committed.timeout_ms
            super()._abort_timed_out()

    return world_with(Core)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check, first = PLANTS[name]
    world = plant(monkeypatch)
    said = list(findings(world, first))
    assert said, "nothing was found"
    with pytest.raises(AssertionError, match=f"^{check}"):
        raise AssertionError(said[0])


def findings(world: type[World], first: int) -> Iterator[str]:
    """What the first seed from ``first`` on that finds something says."""
    for seed in range(first, first + SEEDS_FOR_A_BUG):
        try:
            world(seed).run(STEPS)
        except (Broken, InvariantViolation) as error:
            yield f"{error} (seed {seed})"
            return


def test_an_answer_of_an_old_epoch_that_counts_for_the_new_one_is_found() -> None:
    """By the history of a failover: such an answer is rare (KAFKA-16352)."""

    class Sender(mk.MarkerSender):
        def _answered(self, event: mk.MarkersResponseReceived) -> None:
            super()._answered(event)
            written = {(pid, tp) for pid, tp, error in event.answers if not error.value}
            for job, partitions in tuple(self._unwritten.items()):
                late = {tp for tp in partitions if (job.marker.producer_id, tp) in written}
                for waiting in (self._in_flight, self._queues):
                    for jobs in waiting.values():
                        if job in jobs:
                            jobs[job] -= late
                self._written(job, late)

    class Planted(History):
        sender_class = Sender

    history = Planted()
    text = (Path(__file__).parent / "histories" / "load.txt").read_text()
    command = next(c for c, expected in commands(text) if history.run(c) != expected)
    assert command == "markers 1"
