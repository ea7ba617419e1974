"""Random requests to a core, careless ones, too: every response, record and state is the model's.

Appends commit late, are refused, time out; the next transition is put behind completions that are
staged; producer ids come late or not at all; markers are written piece by piece; the node restarts
on what is in its log.
"""

from __future__ import annotations

import os
import random
from collections import deque
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from msgspec.structs import replace

from kept.node.coordinator.common.events import (
    AppendCommitted,
    AppendRecords,
    AppendRejected,
    AppendStaged,
    AppendTimedOut,
    Response,
)
from kept.node.coordinator.transactions import events as ev
from kept.node.coordinator.transactions.core import TransactionCore
from kept.node.coordinator.transactions.records import TransactionMetadata, decode_record
from kept.steps import run_to_end
from kept.storage.types import TopicPartition
from tests.node.coordinator.transactions import model

HISTORIES = int(os.environ.get("KEPT_TRANSACTION_HISTORIES", "120"))
IDS = ("bank", "shop")
PARTITIONS = [TopicPartition("orders", n) for n in range(3)]
EPOCHS = (0, 1, 32765, 32766, 32767)


def as_held(m: TransactionMetadata) -> model.Held:
    return {
        "status": m.state.kafka_name,
        "pid": m.producer_id,
        "epoch": m.epoch,
        "previous": m.previous_producer_id,
        "next": m.next_producer_id,
        "last": m.last_epoch,
        "timeout": m.timeout_ms,
        "partitions": m.partitions,
        "start": m.start_ms,
        "version": m.client_version,
    }


class Judged:
    """A core and what the model says of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tv = self.random.choice((0, 1, 2, 2))
        self.settings = ev.TransactionSettings(
            transaction_version=self.tv,
            abort_timed_out_interval_ms=2**40,
            remove_expired_interval_ms=2**40,
            add_partitions_retry_backoff_max_ms=0,
        )
        self.now, self.coordinator_epoch = 1_000, 1
        self.wall_offset = 50_000
        self.held: dict[str, model.Held] = {}
        self.proposed: dict[str, model.Held] = {}
        self.completing: dict[str, model.Held] = {}
        """Completions that are staged: the next transition is decided on them."""
        self.expected: dict[int, Any] = {}
        self.log: list[Any] = []
        self.in_flight: deque[tuple[AppendRecords, str]] = deque()
        self.unwritten: dict[str, set[TopicPartition]] = {}
        self.markers: dict[str, ev.WriteMarkers] = {}
        self.draws: deque[int] = deque()
        """Requests that wait for a producer id."""
        self.waiting: dict[int, Any] = {}
        self.fresh: int | None = None
        self.last_pid = 6
        self.request = 0
        self.appended: tuple[str, model.Held] | None = None
        self.transitions = 0
        self.core = self.new_core()

    def new_core(self) -> TransactionCore:
        core = TransactionCore(self.settings, 0, self.coordinator_epoch)
        core.wall_offset_ms = self.wall_offset
        return core

    # What the core does.

    def perform(self, effects: tuple[Any, ...]) -> None:
        for effect in effects:
            match effect:
                case Response():
                    assert self.expected.pop(effect.request) == effect.result, effect
                case AppendRecords():
                    self.check_append(effect)
                case ev.WriteMarkers():
                    self.check_markers(effect)
                case ev.AllocateProducerId():
                    assert self.waiting, "a producer id for nobody"
        self.core.check_invariants()

    def check_append(self, effect: AppendRecords) -> None:
        ((record),) = effect.records
        name, m = record.transactional_id, record.metadata
        assert record.version == (1 if self.tv else 0)
        wanted = self.proposed[name]
        now = self.now + self.wall_offset
        wanted["start"] = now if wanted["start"] == "now" else wanted["start"]
        assert as_held(m) == wanted
        assert m.last_update_ms == now
        before = self.newest(name)
        assert ((before or {"status": "none"})["status"], wanted["status"]) in model.FOLLOWS
        self.transitions += 1
        self.log.append((record.encode(), False))
        self.in_flight.append((effect, name))
        completes = wanted["status"].startswith("Complete")
        if completes and self.random.random() < 0.7:
            self.completing[name] = self.proposed.pop(name)
            self.perform(self.core.step(AppendStaged(effect.append, len(self.log) - 1), self.now))
            assert not effect.atomic or effect.lazy

    def newest(self, name: str) -> model.Held | None:
        return self.completing.get(name) or self.held.get(name)

    def check_markers(self, effect: ev.WriteMarkers) -> None:
        """Only what is committed has markers, all of them, in its own epoch."""
        pid, epoch = effect.marker.producer_id, effect.marker.epoch
        (name,) = [n for n, h in self.held.items() if (h["pid"], h["epoch"]) == (pid, epoch)]
        held = self.held[name]
        assert effect.marker.coordinator_epoch == self.coordinator_epoch
        assert effect.marker.is_commit == (held["status"] == "PrepareCommit")
        assert held["status"].startswith("Prepare")
        assert (effect.marker.version, effect.partitions) == (held["version"], held["partitions"])
        self.markers[name] = effect
        self.unwritten[name] = set(effect.partitions)

    # What happens to it.

    def result(self, event: ev.ClientRequest, word: str, held: model.Held | None) -> Any:
        error = ErrorCode(0 if word == "none" else int(word))
        if error is not ErrorCode.none:
            return ev.failed(event, error)
        if isinstance(event, ev.AddPartitions):
            return ev.AddPartitionsResult()
        assert held is not None
        if held["status"].startswith("Prepare"):
            held = model.complete(held)
        kind = (
            ev.InitProducerIdResult
            if isinstance(event, ev.InitProducerId)
            else ev.EndTransactionResult
        )
        return kind(error, held["pid"], held["epoch"])

    def judge(self, event: ev.ClientRequest) -> None:
        """Let the model say what is to come of a request."""
        name = event.transactional_id
        held, pending = self.newest(name), name in self.proposed
        pid, epoch = event.producer_id, event.epoch
        match event:
            case ev.VerifyPartitions():
                word, absent = model.verify(self.held.get(name), pid, epoch, event.partitions)
                code = ErrorCode(0 if word == "none" else int(word))
                self.expected[event.request] = ev.VerifyPartitionsResult(code, absent)
                return
            case ev.EndTransaction():
                outcome = model.end(
                    held,
                    pid,
                    epoch,
                    commit=event.is_commit,
                    version=event.client_version,
                    pending=pending,
                    fresh=self.fresh,
                )
            case ev.AddPartitions():
                outcome = model.add(held, pid, epoch, event.partitions, event.client_version)
            case ev.InitProducerId():
                outcome = model.init(
                    held, pid, epoch, timeout=event.timeout_ms, fresh=self.fresh, tv=self.tv
                )
        word, after = outcome
        if pending and not isinstance(event, ev.EndTransaction):
            word, after = "51", None
        if word == "draw":
            self.waiting[event.request] = event
            self.draws.append(event.request)
            return
        if after is not None:
            self.proposed[name] = after
            if self.fresh in (after["pid"], after["next"]):
                self.fresh = None
        self.expected[event.request] = self.result(event, word, after or held)

    def send(self) -> None:
        self.request += 1
        event = self.some_request()
        self.judge(event)
        self.perform(self.core.step(event, self.now))

    def some_request(self) -> ev.ClientRequest:
        choose, name = self.random.choice, self.random.choice(IDS)
        held = self.newest(name)
        pid, epoch = -1, -1
        if held is not None and self.random.random() < 0.9:
            pid = choose((held["pid"],) * 6 + (held["previous"], self.last_pid))
            epoch = max(0, held["epoch"] + choose((0,) * 6 + (-1, -1, 1)))
            if pid == held["previous"] != held["pid"]:
                epoch = choose((32765, 32766, 0))
        some = frozenset(self.random.sample(PARTITIONS, self.random.randint(1, 3)))
        version = choose((0, 2))
        kind = self.random.random()
        if kind < 0.25:
            if self.random.random() < 0.5 or pid == -1:
                pid, epoch = -1, -1
            return ev.InitProducerId(self.request, name, choose((1_000, 60_000)), pid, epoch)
        if kind < 0.55:
            return ev.AddPartitions(self.request, name, pid, epoch, some, version)
        if kind < 0.65:
            return ev.VerifyPartitions(self.request, name, pid, epoch, some)
        commit = self.random.random() < 0.5
        return ev.EndTransaction(self.request, name, pid, epoch, commit, version)

    def draw(self) -> None:
        """A producer id comes, or none does."""
        if not self.draws:
            return
        event = self.waiting.pop(self.draws.popleft())
        if self.random.random() < 0.2:
            error = ErrorCode.coordinator_load_in_progress
            self.expected[event.request] = ev.failed(event, error)
            self.perform(self.core.step(ev.ProducerIdAllocationFailed(error), self.now))
            return
        self.last_pid += 1
        self.fresh = self.last_pid
        self.judge(event)
        self.perform(self.core.step(ev.ProducerIdAllocated(self.last_pid), self.now))

    def end_append(self) -> None:
        if not self.in_flight:
            return
        kind = self.random.random()
        if kind < 0.15:
            append, name = self.in_flight[0]
            self.fail(append, name, ErrorCode.coordinator_not_available)
            self.perform(
                self.core.step(
                    AppendTimedOut(append.append, ErrorCode.coordinator_not_available), self.now
                )
            )
        elif kind < 0.3:
            # Refused: it is the newest, and never was in the log.
            append, name = self.in_flight[-1]
            if name in self.completing and name not in self.proposed:
                return  # it is there
            self.in_flight.pop()
            self.log.pop()
            self.fail(append, name, ErrorCode.not_coordinator)
            completes = self.proposed[name]["status"].startswith("Complete")
            if not completes:
                del self.proposed[name]
            self.perform(
                self.core.step(AppendRejected(append.append, ErrorCode.not_coordinator), self.now)
            )
        else:
            self.commit_oldest()

    def fail(self, append: AppendRecords, name: str, error: ErrorCode) -> None:
        for request, result in self.expected.items():
            waits = self.core.pending[append.append].request
            if waits is not None and waits.request == request:
                self.expected[request] = type(result)(error)

    def commit_oldest(self) -> None:
        append, name = self.in_flight.popleft()
        for index, (data, committed) in enumerate(self.log):
            if not committed:
                self.log[index] = (data, True)
                break
        self.apply(name, self.completing.pop(name, None) or self.proposed.pop(name))
        self.perform(self.core.step(AppendCommitted(append.append), self.now))

    def apply(self, name: str, held: model.Held) -> None:
        self.held[name] = held
        if held["status"].startswith("Prepare") and not held["partitions"]:
            self.proposed[name] = model.complete(held)

    def write_markers(self) -> None:
        if not self.unwritten:
            return
        name = self.random.choice(sorted(self.unwritten))
        rest = self.unwritten[name]
        done = frozenset(self.random.sample(sorted(rest), self.random.randint(1, len(rest))))
        rest -= done
        if not rest:
            del self.unwritten[name]
            self.proposed[name] = model.complete(self.held[name])
        marker = self.markers[name].marker
        self.perform(self.core.step(ev.MarkersWritten(0, marker, done), self.now))

    def restart(self) -> None:
        """Another node leads: it has what is committed, and of the rest a beginning."""
        committed = sum(done for _, done in self.log)
        kept = self.random.randint(committed, len(self.log))
        self.log = [(data, True) for data, _ in self.log[:kept]]
        for event in [*self.waiting.values()]:
            self.expected[event.request] = ev.failed(event, ErrorCode.not_coordinator)
        for request, result in self.expected.items():
            self.expected[request] = type(result)(ErrorCode.not_coordinator)
        self.perform_unload()
        self.waiting.clear()
        self.draws.clear()
        self.in_flight.clear()
        self.proposed.clear()
        self.completing.clear()
        self.unwritten.clear()
        self.markers.clear()
        self.held.clear()
        self.fresh = None
        self.coordinator_epoch += 1
        self.core = self.new_core()
        for (key, value), _ in self.log:
            record = decode_record(key, value)
            self.core.replay(record)
            self.held[record.transactional_id] = as_held(record.metadata)
        for name, held in self.held.items():
            self.apply(name, held)
        self.perform(run_to_end(self.core.loaded(self.now)))

    def perform_unload(self) -> None:
        self.perform(self.core.unload())
        assert not self.expected, "somebody waits for ever"

    def jump(self) -> None:
        """As after many transactions: an epoch near the last."""
        busy = {*self.proposed, *self.completing}
        idle = [n for n, h in self.held.items() if n not in busy]
        idle = [n for n in idle if self.held[n]["status"] in ("Empty", "CompleteCommit")]
        if not idle:
            return
        name, epoch = self.random.choice(idle), self.random.choice(EPOCHS[2:4])
        entry = self.core.ids.hold(name)
        entry.committed = replace(entry.committed, epoch=max(epoch, entry.committed.epoch))
        self.held[name] = as_held(entry.committed)

    def run(self, steps: int) -> None:
        self.perform(run_to_end(self.core.loaded(self.now)))
        for _ in range(steps):
            self.now += self.random.choice((0, 1, 50))
            self.perform(self.core.tick(self.now))
            kind = self.random.random()
            if kind < 0.45:
                self.send()
            elif kind < 0.72:
                self.end_append()
            elif kind < 0.84:
                self.write_markers()
            elif kind < 0.96:
                self.draw()
            elif kind < 0.99:
                self.jump()
            else:
                self.restart()
            states = {n: as_held(h.committed) for n, h in self.core.ids.items() if h.committed}
            assert states == self.held


@pytest.mark.parametrize("chunk", range(4))
def test_the_core_is_as_the_model_says(chunk: int) -> None:
    transitions = 0
    for seed in range(chunk * HISTORIES // 4, (chunk + 1) * HISTORIES // 4):
        judged = Judged(seed)
        try:
            judged.run(300)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        transitions += judged.transitions
    assert transitions > 20 * HISTORIES // 4, "hardly anything happened"
