"""The check of a pass, before anything is put into place: sampled keys, and what became of them.

:func:`sample_records` takes records of the log at random, straight from its files. While the survey
scans the log it notes where the records of their keys are (``key_tracker.py``). Once the outputs
are built, :func:`check` proves for each key, from the files alone:

- the scan saw the record that was drawn, and saw no record of another key or of an aborted
  transaction;
- what the strategy promises of these records is in the outputs, with the same timestamp, key, value
  and headers, and with a delete horizon that was not moved. The promise comes from the classes in
  ``strategy.py``, which are not what the kernels run; of a user's strategy it is what that said;
- the others are not: a record that is gone was superseded by one that is there, or by a tombstone
  past its horizon, of which no older record is left. A tombstone that stays has none below it
  either, or they would come back when it goes.

A pass for horizons, or a base generation, maps nothing: of it only the records drawn are checked.
:func:`check_followed` does as much for a manifest of another replica: the records drawn, of
segments that were rewritten, are there exactly if the manifest says so, with its delete horizons.
That these are the right ones its leader has proved, and the digests carry that over.

Neither the survivors' bitmaps nor the maps are asked. How much is read is bounded by a share of the
log, so that it costs less than three hundredths of the cleaning. :class:`CheckFailed` stops the
pass: the node leaves the log as it is until somebody has looked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from kept.compaction.cleaner.job import Job, Source
from kept.compaction.cleaner.key_tracker import MAX_KEYS, RING, KeyOffsets
from kept.compaction.cleaner.segment_reader import Batch, Extent, SegmentReader
from kept.compaction.strategies.scans import keeps
from kept.compaction.strategy import ByKeyPrefix, From, Latest, LatestN, Strategy, Verdict, rules
from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData, KeptError
from kept.storage.records import BatchHeader, Record
from kept.storage.segments.txn_index import AbortedTxn

if TYPE_CHECKING:
    from kept.compaction.cleaner.build import Built
    from kept.compaction.cleaner.survey import Survey
    from kept.compaction.manifest.follow import FollowJob
    from kept.storage.segments.swap import SwapPlan

MIN_KEYS: Final = 8
BYTES_PER_KEY: Final = 16 << 20
"""A log of so many bytes more is worth another key."""
READ_SHARE: Final = 128
MIN_READ_BYTES: Final = 1 << 20
"""No further record is looked at once this share of the log, or so much, was read."""
DRAWS_PER_KEY: Final = 4
"""Records of keys that were drawn before are put back, and others drawn, so often at most."""
GONE_CHECKED: Final = 2
"""Of the records of a key that must be gone so many are looked for, the newest first."""
SHOWN_BYTES: Final = 48
"""A longer key is shown cut off."""


class CheckFailed(KeptError):
    """A pass would lose a record, or bring one back. It was stopped, the log is as it was."""


@dataclass(frozen=True, slots=True)
class SampledRecord:
    """A record that was drawn: where it is, and what it is about."""

    source: Source
    offset: int
    key: bytes


class _Dice:
    """Numbers that are a function of a seed."""

    def __init__(self, seed: bytes) -> None:
        self._seed, self._count = seed, 0

    def below(self, end: int) -> int:
        """0 <= n < end."""
        from hashlib import blake2b  # only a worker needs it, but the node imports this, too

        self._count += 1
        digest = blake2b(self._seed + self._count.to_bytes(8, "big"), digest_size=8)
        return int.from_bytes(digest.digest(), "big") % end


def wanted_keys(check_keys: int, source_bytes: int) -> int:
    """How many keys a pass over so many bytes checks, of ``check_keys`` at most."""
    return min(check_keys, max(MIN_KEYS, source_bytes // BYTES_PER_KEY), MAX_KEYS)


def read_limit(source_bytes: int) -> int:
    """How many bytes of a log of this size are read before the drawing, or the proving, ends."""
    return max(source_bytes // READ_SHARE, MIN_READ_BYTES)


def sample_records(job: Job, disk: Disk, strategy: Strategy) -> list[SampledRecord]:
    """Records of the log at random, by the job's random bytes; each key once."""
    sources = [s for s in job.sources if not job.horizons_only or s.base_offset in job.rewrite]
    wanted = wanted_keys(job.check_keys, job.source_bytes)
    seed = b"check" + (job.hash_key or str(job.generation).encode())
    drawn: dict[bytes, SampledRecord] = {}
    draws = DRAWS_PER_KEY * wanted
    for source, batch, offset in _samples(job.directory, disk, sources, _Dice(seed), draws):
        if len(drawn) == wanted:
            break
        record = batch.find(offset)
        if record is None or record.key is None or offset < job.log_start_offset:
            continue
        if not _aborted(batch.header, job.aborted):
            key = strategy.key(record)
            drawn.setdefault(key, SampledRecord(source, offset, key))
    return list(drawn.values())


def _samples(
    directory: str, disk: Disk, sources: Sequence[Source], dice: _Dice, draws: int
) -> Iterator[tuple[Source, Batch, int]]:
    """(source, batch, offset) of data records, each byte of the sources as likely as another."""
    total = sum(source.size_bytes for source in sources)
    readers: dict[int, SegmentReader] = {}
    limit = read_limit(total)
    for _ in range(draws if total else 0):
        if sum(reader.read_bytes for reader in readers.values()) > limit:
            break
        at = dice.below(total)
        for source in sources:
            if at < source.size_bytes:
                break
            at -= source.size_bytes
        reader = readers.get(source.base_offset)
        if reader is None:
            reader = readers[source.base_offset] = SegmentReader(disk, extent_of(directory, source))
        batch = reader.at_position(source.start_bytes + at)
        if batch is not None and batch.columns.count and not batch.header.is_control:
            yield source, batch, batch.columns.offsets[dice.below(batch.columns.count)]


def extent_of(directory: str, source: Source) -> Extent:
    """Where a source is."""
    return Extent(
        source.path(directory),
        source.path(directory, layout.INDEX),
        source.base_offset if source.file_offset < 0 else source.file_offset,
        source.start_bytes,
        source.start_bytes + source.size_bytes,
    )


def _aborted(header: BatchHeader, aborted: Sequence[AbortedTxn]) -> bool:
    return header.is_transactional and any(
        txn.producer_id == header.producer_id
        and txn.first_offset <= header.base_offset <= txn.last_offset
        for txn in aborted
    )


def check(
    job: Job,
    drawn: Sequence[SampledRecord],
    survey: Survey,
    built: Built,
    disk: Disk,
    *,
    strategy: Strategy,
) -> int:
    """Check; returns for how many keys. Raises CheckFailed, DamagedData, MachineError."""
    after = [(segment.base_offset, segment.end_offset) for segment in built.manifest.segments]
    files = _Files(job.directory, disk, job.sources, after, built.plan)
    name = f"{job.topic_partition.place}: check of generation {job.generation}"
    judge = _Judge(job, strategy, survey, files, name)
    limit = read_limit(job.source_bytes)
    checked = 0
    for record in drawn:
        if files.read_bytes > limit:
            break
        checked += judge.is_right(record)
    return checked


def check_followed(job: FollowJob, plan: SwapPlan, disk: Disk) -> int:
    """The same for outputs that follow from another replica's manifest; see the module. Raises
    CheckFailed.
    """
    sources = [source for piece in job.pieces for source in piece.sources]
    rewritten = {base for group in plan.groups for base in group.input_bases}
    chosen = [source for source in sources if source.file_offset in rewritten]
    total = sum(source.size_bytes for source in chosen)
    after = [(p.base_offset, p.output.end_offset) for p in job.pieces if p.output is not None]
    files = _Files(job.directory, disk, sources, after, plan)
    name = f"{job.directory}: check of generation {job.manifest.generation}"
    wanted, limit = wanted_keys(job.check_keys, total), read_limit(total)
    checked = 0
    for _, batch, offset in _samples(job.directory, disk, chosen, _Dice(job.check_seed), wanted):
        record = batch.find(offset)
        stays = job.manifest.survives(offset)
        if record is None or stays is None:
            continue
        if files.read_bytes > limit:
            break
        horizon_ms = job.manifest.delete_horizon_of(batch.header.base_offset)
        if horizon_ms is None:
            horizon_ms = _horizon_ms(batch.header)
        problem = _compared(record, horizon_ms, files.output(offset), stays=stays)
        if problem is not None:
            raise CheckFailed(f"{name}: {_said(record.key, offset, problem)}")
        checked += 1
    return checked


class _Files:
    """The log before and after, by offset; ``after``: base and end of each output."""

    def __init__(
        self,
        directory: str,
        disk: Disk,
        sources: Sequence[Source],
        after: Sequence[tuple[int, int]],
        plan: SwapPlan,
    ) -> None:
        self._disk, self._directory = disk, directory
        self._sources, self._after = sources, after
        self._new = {base for group in plan.groups for base in group.output_bases}
        self._readers: dict[Extent, SegmentReader] = {}

    @property
    def read_bytes(self) -> int:
        """What was read so far."""
        return sum(reader.read_bytes for reader in self._readers.values())

    def _read(self, where: Extent, offset: int) -> Batch | None:
        reader = self._readers.get(where)
        if reader is None:
            reader = self._readers[where] = SegmentReader(self._disk, where)
        return reader.at_offset(offset)

    def input(self, offset: int) -> Batch | None:
        """The batch that an offset is in, as it was."""
        for source in self._sources:
            if source.base_offset <= offset < source.end_offset:
                return self._read(extent_of(self._directory, source), offset)
        return None

    def output(self, offset: int) -> Batch | None:
        """The batch that an offset is in, as it will be."""
        for base, end in self._after:
            if not base <= offset < end:
                continue
            if base not in self._new:
                return self.input(offset)
            log_path, index_path = (
                layout.segment_file(self._directory, base, kind, layout.CLEANED)
                for kind in (layout.LOG, layout.INDEX)
            )
            size = self._disk.stat(log_path).size_bytes
            try:
                return self._read(Extent(log_path, index_path, base, 0, size), offset)
            except DamagedData as error:
                raise CheckFailed(f"the output cannot be read: {error}") from error
        return None


@dataclass(slots=True)
class _Judge:
    """What must have become of the records of a key."""

    job: Job
    strategy: Strategy
    found: Survey
    files: _Files
    name: str

    def is_right(self, drawn: SampledRecord) -> bool:
        """False: too little is known of the key to tell. Raises CheckFailed."""
        if self.job.base or self.job.horizons_only or drawn.offset >= self.found.manifest.clean_to:
            return self._alone(drawn)
        evidence = self.found.watched_offsets.get(drawn.key)
        if evidence is None:
            return False
        offsets, whole = evidence
        if drawn.offset not in offsets and (whole or drawn.offset > offsets[0]):
            self._fail(drawn, drawn.offset, f"it is not among those that the scan saw: {offsets}")
        promised = self._promised(drawn, evidence)
        if promised is None:
            return False
        kept, gone = promised
        for offset in kept:
            self._compare(drawn, offset, stays=True, why=f"the strategy keeps {kept}")
        for offset in gone:
            batch = self.files.output(offset)
            if batch is not None and batch.find(offset) is not None:
                why = f"it must be gone, and is in the output; the strategy keeps {kept}"
                self._fail(drawn, offset, why)
        return True

    def _alone(self, drawn: SampledRecord) -> bool:
        """Nothing supersedes this record: it stays, unless it is a tombstone past its horizon."""
        record, header = self._read(drawn, drawn.offset)
        stays = self.job.base or not self._expired(record, header)
        if drawn.offset >= self.found.manifest.clean_to:
            stays = True
        self._compare(drawn, drawn.offset, stays=stays, why="nothing supersedes it")
        return True

    def _promised(
        self, drawn: SampledRecord, evidence: KeyOffsets
    ) -> tuple[list[int], list[int]] | None:
        """(offsets that must be there, those that must not); None: not enough is known."""
        offsets, whole = evidence
        verdict = self._verdict(drawn, evidence)
        if verdict is None:
            return None
        kept = [offset for offset in offsets if keeps(verdict, offset)]
        if not kept:
            return (kept, offsets[-GONE_CHECKED:]) if whole else None
        winner = kept[-1]
        is_tombstone = self._read(drawn, winner)[0].value is None
        if is_tombstone:
            kept = [winner]
        gone = [offset for offset in offsets if offset not in kept]
        superseded_now = type(self.strategy) is not Latest or winner >= self.job.first_dirty
        if not superseded_now and not is_tombstone:
            gone = []
        expired = [o for o in kept if self._expired(*self._read(drawn, o))]
        kept = [offset for offset in kept if offset not in expired]
        return kept, [*expired, *gone[-GONE_CHECKED:]]

    def _verdict(self, drawn: SampledRecord, evidence: KeyOffsets) -> Verdict | None:
        """What the strategy says of a key's records."""
        offsets, whole = evidence
        if rules(self.strategy) is None:
            return self.found.watched_verdicts.get(drawn.key)
        strategy = self.strategy
        if isinstance(strategy, ByKeyPrefix):
            strategy = next(part for prefix, part in strategy.parts if drawn.key.startswith(prefix))
        if isinstance(strategy, Latest):
            self._read(drawn, offsets[-1])
            return From(offsets[-1])
        if isinstance(strategy, LatestN):
            if strategy.n > RING and not whole:
                return None
            offsets = offsets[-strategy.n :]
        elif not whole:
            return None
        state = strategy.init(1)
        for offset in offsets:
            strategy.reduce(state, drawn.key, self._read(drawn, offset)[0])
        return strategy.collect(state)[drawn.key]

    def _read(self, drawn: SampledRecord, offset: int) -> tuple[Record, BatchHeader]:
        """A record that the scan saw, as it was before the pass."""
        batch = self.files.input(offset)
        record = None if batch is None else batch.find(offset)
        if batch is None or record is None:
            self._fail(drawn, offset, "the scan saw it, and it is not in the log")
        if record.key is None or self.strategy.key(record) != drawn.key:
            self._fail(drawn, offset, "the scan took it for this key, and it has another one")
        if _aborted(batch.header, self.job.aborted):
            self._fail(drawn, offset, "the scan counted it, and its transaction was aborted")
        return record, batch.header

    def _expired(self, record: Record, header: BatchHeader) -> bool:
        """Rule 5: a tombstone past its horizon."""
        if record.value is not None or not header.has_delete_horizon:
            return False
        return header.delete_horizon_ms <= self.job.now_ms

    def _compare(self, drawn: SampledRecord, offset: int, *, stays: bool, why: str) -> None:
        record, header = self._read(drawn, offset)
        horizon_ms = _horizon_ms(header)
        problem = _compared(record, horizon_ms, self.files.output(offset), stays=stays)
        if problem is not None:
            self._fail(drawn, offset, f"{problem}; {why}")

    def _fail(self, drawn: SampledRecord, offset: int, problem: str) -> NoReturn:
        raise CheckFailed(
            f"{self.name}: {_said(drawn.key, offset, problem)}; nothing was changed: keep the "
            "files and report it, `kept compact retry` tries again"
        )


def _horizon_ms(header: BatchHeader) -> int | None:
    return header.delete_horizon_ms if header.has_delete_horizon else None


def _compared(
    record: Record, horizon_ms: int | None, output: Batch | None, *, stays: bool
) -> str | None:
    """What is wrong with the output of a record; None when it is as it must be.

    ``horizon_ms`` is the delete horizon that its batch must have, if it must have a certain one.
    """
    there = None if output is None else output.find(record.offset)
    if there is None or output is None:
        return "it must survive, and is not in the output" if stays else None
    if not stays:
        return "it must be gone, and is in the output"
    if there != record:
        return "it is not the same record in the output"
    if horizon_ms is not None and record.value is None:
        built_ms = _horizon_ms(output.header)
        if built_ms != horizon_ms:
            return f"its delete horizon must be {horizon_ms}, and is {built_ms}"
    return None


def _said(key: bytes | None, offset: int, problem: str) -> str:
    return f"key {shown(key or b'')}, offset {offset}: {problem}"


def shown(key: bytes) -> str:
    """A key for people: as text where it is, cut off where it is long."""
    text = repr(key[:SHOWN_BYTES].decode("utf-8", "backslashreplace"))
    return text if len(key) <= SHOWN_BYTES else f"{text} and {len(key) - SHOWN_BYTES} bytes more"
