"""What a cut of a log must read of its producers, read before it, where that blocks nobody.

After a cut the producers are made anew from the newest snapshot below it and the batches after
that, which may be all of an active segment. A :class:`CutPreparation` reads those below the cut in
any thread while the log stays as it is, and changes nothing. One that the log has overtaken, or
that failed, counts for nothing: the cut reads for itself then, and meets the error. But damage of a
segment is told before anything is gone: an index leads to the place of a cut past it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kept.storage.disk import Disk
from kept.storage.errors import DamagedData, KeptError
from kept.storage.producers import snapshots
from kept.storage.producers.producer_state_manager import ProducerStateManager, replay
from kept.storage.producers.producer_states import ProducerStates
from kept.storage.segments.segment import Segment

INLINE_BYTES: Final = 1 << 20
"""So much is read at once, where the cut is asked for."""


class CutPreparation:
    """The producers of a log below ``offset``; see the module. ``states``, or ``damage`` of a
    segment, once :meth:`run` is over; ``begun`` for whoever runs it.

    ``segments``: those to read, ascending, the first from ``position`` on. ``snapshot``: where the
    producers before that are. ``truncations``: how often the log had been cut.
    """

    __slots__ = (
        "_disk",
        "_expiration_ms",
        "_position",
        "_segments",
        "_snapshot",
        "begun",
        "damage",
        "done",
        "offset",
        "states",
        "truncations",
    )

    def __init__(  # noqa: PLR0917
        self,
        disk: Disk,
        offset: int,
        truncations: int,
        segments: Sequence[Segment],
        position: int,
        snapshot: str | None,
        expiration_ms: int,
    ) -> None:
        self._disk = disk
        self._segments = segments
        self._position = position
        self._snapshot = snapshot
        self.offset = offset
        self.truncations = truncations
        self._expiration_ms = expiration_ms
        self.states: ProducerStates | None = None
        self.damage: DamagedData | None = None
        self.begun = self.done = False

    def run(self) -> None:
        """Read; blocks. Any other error leaves ``states`` None, and is the cut's to meet."""
        states = ProducerStates(self._expiration_ms)
        try:
            if self._snapshot is not None:
                states.restore(snapshots.decode(self._snapshot, self._disk.read(self._snapshot)))
            for number, segment in enumerate(self._segments):
                replay(segment, 0 if number else self._position, states, end=self.offset)
        except DamagedData as error:
            if error.path != self._snapshot:  # the cut takes an older one in its place
                self.damage = error.without_frames()
            return
        except (KeptError, OSError):
            return
        else:
            self.states = states
        finally:
            self.done = True

    def fits(self, offset: int, truncations: int, segments: Iterable[Segment]) -> bool:
        """The log is as it was, below a cut at ``offset``."""
        there = set(map(id, segments))
        same = (self.offset, self.truncations) == (offset, truncations)
        return same and all(id(segment) in there for segment in self._segments)


def prepare(manager: ProducerStateManager, offset: int, truncations: int) -> CutPreparation | None:
    """What is to be read before a cut at ``offset``, done where it is little; None: nothing. Raises
    DamagedData, MachineError.
    """
    if manager.states.is_empty:
        return None
    segments = manager.segments
    first = segments.bases[0]
    known = [known for known in manager.snapshot_offsets() if first <= known <= offset]
    start = known[-1] if known else first
    if start == offset:
        return None
    low, high = segments.floor(start), segments.floor(offset)
    if segments.bases[high] == offset:
        high -= 1  # all of that one goes, and it may be damaged
    begins, ends = segments[low].locate(start), segments[high].locate(offset)
    if begins is None:
        return None
    kept = segments[low : high + 1]
    size_bytes = sum(segment.size_bytes for segment in kept) - begins[0]
    if ends is not None:
        size_bytes -= segments[high].size_bytes - ends[0]
    snapshot = manager.path(start) if known else None
    preparation = CutPreparation(
        manager.disk, offset, truncations, kept, begins[0], snapshot, manager.states.expiration_ms
    )
    if size_bytes <= INLINE_BYTES:
        preparation.run()
    return preparation
