"""Copiers of stage ``transactions``: they consume a topic as members of one group, produce what
they make of it to others, and commit their offsets in the same transactions (KIP-447).

Each slot of the group has a transactional id. A copier whose generation is over aborts and joins
again; one that was fenced, or died, is followed by another one under its id, at times while the
group still gives its partitions to a third.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kept.storage.errors import KeptError
from kept.storage.records import records
from kept.storage.types import TopicPartition
from tests.sim.groups_clients import AGAIN_S, BEAT_S, LOST, UNSTABLE, Life, Member, Rejoin
from tests.sim.transactions_checks import moved
from tests.sim.transactions_clients import TXN_OFFSET_COMMIT, Instance, Over

if TYPE_CHECKING:
    from tests.sim.transactions_history import TransactionsHistory

GROUP: Final = "movers"  # its coordinator follows from the name: histories would be others
SOURCE: Final = "source"
MOST: Final = 5
"""Records that one transaction moves."""
COMMITS: Final = 0.85
"""How many of their transactions copiers commit."""


class Copier(Member):
    """A slot of the group. ``level``: of its transactions."""

    history: TransactionsHistory  # type: ignore[assignment]

    def __init__(self, history: TransactionsHistory, name: str, level: int) -> None:
        super().__init__(history, GROUP, name, False, 0.5)  # type: ignore[arg-type]
        self.level = level

    @property
    def live(self) -> type[Life]:
        """See :meth:`Member.live`."""
        return CopierLife


class CopierLife(Life):
    """One life of a copier: with a producer of its own."""

    def __init__(self, slot: Copier, name: str) -> None:
        super().__init__(slot, name)
        self.moves = slot.history
        self.producer = Instance(slot, name)
        self.producer.group = GROUP
        self._begun = False
        self._offsets: dict[int, int] = {}

    async def _work(self, until_s: float) -> None:
        """Move what comes, then heartbeat, till this life is over."""
        history = self.moves
        try:
            if not self._begun:
                await self.producer.initialize()
                self._begun = True
            await self._read()
            while history.running and history.loop.time() < until_s:
                await asyncio.sleep(history.random.uniform(0, BEAT_S))
                if history.random.random() < history.nap_share:
                    await self._nap()
                for partition in self.part:
                    await self._move(partition)
                beat = await self.client.send(
                    12,
                    4,
                    generation_id=self.generation,
                    member_id=self.member_id,
                    group_instance_id=None,
                )
                self._refused(beat.error_code.name)
        except Over as over:
            history.note("mover", f"{self.name} ends: {over}")
            await asyncio.sleep(AGAIN_S)

    async def _read(self) -> None:
        """Where its group is, once no transaction is open that may move it."""
        while self.part:
            found = await self.client.committed(await self.client.find(), stable=True)
            if isinstance(found, dict) and all(found[p] != UNSTABLE for p in self.part):
                self._offsets = {p: max(found[p], 0) for p in self.part}
                return
            if isinstance(found, str) and found in LOST:
                self.client.coordinator = None
            if not self.moves.running:
                raise Over("the history ends")
            await asyncio.sleep(AGAIN_S)

    async def _move(self, partition: int) -> None:
        """A transaction, if there is something to move. Raises Rejoin, Over, KeptError."""
        history, producer, tp = self.moves, self.producer, TopicPartition(SOURCE, partition)
        machine = await self.client.leader(tp)
        if machine is None:
            self.client.forget(tp)
            return
        try:
            found = await self.client.fetch(machine, tp, self._offsets[partition])
        except KeptError:
            self.client.forget(tp)
            return
        if found.error != "none":
            self.client.forget(tp)
            return
        begin = self._offsets[partition]
        read = [rec for rec in records(found.records) if rec.offset >= begin][:MOST]
        if not read:
            return
        transaction, attempt = producer.begin(), history.next_value()
        end = read[-1].offset + 1
        try:
            sink = history.random.choice(history.data)
            await producer.add(sink)
            values = [moved(bytes(rec.value or b""), attempt) for rec in read]
            now_ms = producer.now_ms()
            await producer.produce(transaction, sink, [(now_ms, None, v, ()) for v in values])
            await producer.add_offsets()
            await producer.commit_offsets(SOURCE, {partition: end}, self.generation, self.member_id)
        except Over as over:
            if over.api != TXN_OFFSET_COMMIT:
                raise
            history.world.counts["movers of an old generation"] += 1
            await producer.end(transaction, commit=False)
            raise Rejoin from over
        commit = history.random.random() < COMMITS
        await producer.end(transaction, commit=commit)
        if commit:
            self._offsets[partition] = end
            history.world.counts["records moved"] += len(read)
