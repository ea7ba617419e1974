"""Who waits for the high watermark, beside a sorted list."""

from __future__ import annotations

import random

import pytest

from kept.replication.progress import CommitQueue


@pytest.mark.parametrize("seed", range(40))
def test_as_a_sorted_list(seed: int) -> None:
    rnd = random.Random(seed)
    queue, waiting, token = CommitQueue(), list[tuple[int, int]](), 0
    for _ in range(300):
        kind = rnd.random()
        if kind < 0.5:
            token += 1
            waiting.append((rnd.randrange(50), token))
            queue.add(token, waiting[-1][0])
        elif kind < 0.9 and waiting:
            queue.forget(waiting.pop(rnd.randrange(len(waiting)))[1])
        elif kind < 0.98:
            reached = rnd.randrange(20)
            assert queue.reaches(reached) or all(end > reached for end, _ in waiting)
            assert list(queue.reached(reached)) == [
                t for end, t in sorted(waiting) if end <= reached
            ]
            waiting = [entry for entry in waiting if entry[0] > reached]
        else:
            assert queue.drain() == [t for _, t in sorted(waiting)]
            waiting.clear()
        assert queue.ends == [end for end, _ in sorted(waiting)]
        assert queue or not waiting


def test_forgetting_takes_no_walk_through_all_each_time() -> None:
    queue, walked = CommitQueue(), 0
    for token in range(1, 10_001):
        queue.add(token, token)
    for token in range(1, 10_001):
        before = queue._waiting
        queue.forget(token)
        walked += len(before) if queue._waiting is not before else 0
    assert walked < 40_000 and not queue
