"""What a read_committed consumer sees of a compacted log is what it saw before."""

from __future__ import annotations

import random

import pytest

from kept.client.consume.aborted_filter import aborted_batches
from kept.storage.inspect.check import check_partition
from kept.storage.records import headers, records

KEYS, PRODUCERS, STEPS = 8, 4, 150


def stable_offset(w) -> int:
    end = w.log.log_end_offset
    first = w.log.producers.first_undecided_offset(end, w.log.log_start_offset)
    return end if first is None else first


def committed_view(w) -> dict[bytes, tuple[int, bytes | None]]:
    """Offset and value of the newest record of each key, up to the last stable offset, as a
    consumer reads it; a key whose newest record is a tombstone is not there.
    """
    seen: dict[bytes, tuple[int, bytes | None]] = {}
    offset, stable = w.log.log_start_offset, stable_offset(w)
    while offset < stable and (found := w.log.read(offset, 400, stable)) is not None:
        data = w.disk.pread(*found)
        aborted = w.log.aborted_in_slice(offset, found, stable)
        hidden = aborted_batches(data, [(txn.producer_id, txn.first_offset) for txn in aborted])
        for at, header in headers(data):
            if at not in hidden and not header.is_control:
                for record in records(data[at : at + header.size_bytes]):
                    seen[record.key] = record.offset, record.value
            offset = header.next_offset
    return {key: held for key, held in seen.items() if held[1] is not None}


class Model:
    """The same, from what was done to the log."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, bytes, bytes | None]] = []
        """(offset, producer or -1, key, value)."""
        self.ends: dict[int, bool | None] = {}
        """Of the record at an offset: whether its transaction was committed, None while open."""
        self.open: dict[int, list[int]] = {pid: [] for pid in range(PRODUCERS)}

    def view(self, stable: int) -> dict[bytes, tuple[int, bytes | None]]:
        seen: dict[bytes, tuple[int, bytes | None]] = {}
        for offset, pid, key, value in self.rows:
            if offset < stable and (pid < 0 or self.ends[offset]):
                seen[key] = offset, value
        return {key: held for key, held in seen.items() if held[1] is not None}


def play(w, seed: int) -> None:
    draw, model = random.Random(seed), Model()
    sequences = dict.fromkeys(range(PRODUCERS), 0)
    for n in range(STEPS):
        kind = draw.choices(["data", "plain", "end", "roll", "clean"], [8, 3, 4, 3, 2])[0]
        pid = draw.randrange(PRODUCERS)
        if kind in ("data", "plain"):
            rows = [
                (b"k%d" % draw.randrange(KEYS), draw.choice([None, b"%d.%d" % (n, i)]))
                for i in range(draw.randint(1, 3))
            ]
            if kind == "data":
                base = w.append(*rows, pid=pid, sequence=sequences[pid], transactional=True)
                sequences[pid] += len(rows)
                model.open[pid] += range(base, base + len(rows))
            else:
                base = w.append(*rows)
            writer = pid if kind == "data" else -1
            for i, (key, value) in enumerate(rows):
                model.rows.append((base + i, writer, key, value))
                model.ends[base + i] = None
        elif kind == "end":
            is_commit = draw.random() < 0.5
            w.marker(pid, commit=is_commit)
            for offset in model.open[pid]:
                model.ends[offset] = is_commit
            model.open[pid] = []
        elif kind == "roll":
            w.roll()
            w.now += draw.choice([1, 1000, 100_000])
        else:
            w.clean(lso=stable_offset(w))
            assert committed_view(w) == model.view(stable_offset(w)), n
    assert committed_view(w) == model.view(stable_offset(w))
    w.log.close()
    assert [str(f) for f in check_partition(w.log.directory, w.disk) if f.damaged] == []


@pytest.mark.parametrize("seed", range(12))
def test_random_transactions_are_read_as_before(world, seed):
    play(world(delete_retention_ms=5000), seed)


def test_a_key_whose_newest_record_is_aborted_keeps_the_committed_one(world):
    w = world()
    w.append((b"a", b"good"), (b"b", b"good"))
    w.append((b"a", b"better"), pid=1, sequence=0, transactional=True)
    w.marker(1, commit=True)
    for pid, value in ((2, b"bad"), (3, None)):
        w.append((b"a", value), (b"b", value), pid=pid, sequence=0, transactional=True)
        w.marker(pid, commit=False)
    w.append((b"z", b"1"))
    w.roll()
    before = committed_view(w)
    w.clean(lso=stable_offset(w))
    assert w.result.removed["aborted"] == 4
    assert (
        committed_view(w) == before == {b"b": (1, b"good"), b"a": (2, b"better"), b"z": (10, b"1")}
    )
