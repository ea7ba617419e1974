"""Leader epochs: KIP-101's look-ups, against a model that knows the epoch of every offset."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.storage.errors import DamagedData, InvariantViolation
from kept.storage.log.leader_epoch_cache import LeaderEpochCache
from tests.support.simulated_disk import SimulatedDisk

PATH = "/leader-epoch-checkpoint"


def cache(*entries: tuple[int, int], end: int = 100) -> LeaderEpochCache:
    made = LeaderEpochCache(SimulatedDisk(), PATH, list(entries))
    made.log_end_offset = lambda: end
    return made


@pytest.mark.parametrize(
    ("epoch", "answer"),
    [
        (0, (0, 10)),
        (1, (1, 10)),
        (2, (2, 20)),
        (3, (2, 20)),
        (4, (4, 30)),
        (5, (4, 30)),
        (6, (6, 100)),
        (7, None),
        (-1, None),
    ],
)
def test_end_offsets_as_in_kafka(epoch, answer) -> None:
    epochs = cache((2, 10), (4, 20), (6, 30))
    assert epochs.end_offset_for(epoch) == answer


def test_nothing_is_known_of_an_empty_cache() -> None:
    assert cache().end_offset_for(0) is None and cache().latest is None


def test_assigning() -> None:
    epochs = cache()
    assert epochs.assign(1, 0) and epochs.assign(3, 10)
    assert not epochs.assign(3, 50), "the latest epoch again is no news"
    with pytest.raises(InvariantViolation):
        epochs.assign(2, 60)
    assert epochs.assign(5, 10), "an epoch without records leaves no trace"
    assert epochs.entries == [(1, 0), (5, 10)]
    with pytest.raises(InvariantViolation):
        epochs.assign(-1, 0)


def test_truncation_at_both_ends() -> None:
    epochs = cache((1, 0), (2, 10), (3, 20))
    epochs.truncate_from_end(20)
    assert epochs.entries == [(1, 0), (2, 10)]
    epochs.truncate_from_start(15)
    assert epochs.entries == [(2, 15)]
    epochs.truncate_from_start(12)
    assert epochs.entries == [(2, 15)]
    epochs.clear()
    assert epochs.entries == []


def test_saving_and_loading() -> None:
    disk = SimulatedDisk()
    epochs = LeaderEpochCache.load(disk, PATH)
    assert not epochs.dirty
    epochs.save()
    assert not disk.exists(PATH), "nothing to save, nothing saved"
    epochs.assign(1, 0)
    epochs.assign(4, 7)
    assert epochs.dirty
    epochs.save()
    assert not epochs.dirty
    assert disk.read(PATH) == b"0\n2\n1 0\n4 7\n"
    assert LeaderEpochCache.load(disk, PATH).entries == [(1, 0), (4, 7)]
    disk.write_file(PATH, b"")
    assert LeaderEpochCache.load(disk, PATH).entries == []


def test_the_cache_of_a_deleted_log_saves_nothing() -> None:
    disk = SimulatedDisk()
    epochs = LeaderEpochCache.load(disk, PATH)
    epochs.assign(1, 0)
    epochs.retire()
    epochs.save()
    assert not disk.exists(PATH), "it may be another log's by now"
    for damage in (b"0\n2\n4 7\n1 0\n", b"0\n1\n1\n", b"0\n2\n1 5\n2 3\n", b"1\n0\n"):
        disk.write_file(PATH, damage)
        with pytest.raises(DamagedData):
            LeaderEpochCache.load(disk, PATH)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), max_size=8),
    cut_end=st.integers(0, 30),
    cut_start=st.integers(0, 30),
)
def test_agrees_with_a_list_of_epochs(lengths, cut_end, cut_start) -> None:
    model: list[int] = []
    epochs = LeaderEpochCache(SimulatedDisk(), PATH, [])
    epoch = 0
    for step, count in lengths:
        epoch += step
        epochs.assign(epoch, len(model))
        model += [epoch] * count
    del model[cut_end:]
    end = len(model)
    epochs.truncate_from_end(end)
    epochs.log_end_offset = lambda: end
    start = min(cut_start, end)
    epochs.truncate_from_start(start)
    for offset in range(start, end):
        assert [e for e, first in epochs.entries if first <= offset][-1] == model[offset]
    live = model[start:]
    for asked in set(live):
        assert epochs.end_offset_for(asked) == (asked, start + len(live) - live[::-1].index(asked))
