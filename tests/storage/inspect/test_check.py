"""What ``kept log check`` costs, where a segment is large."""

from __future__ import annotations

from array import array
from typing import Any

from kept.storage.disk import Disk
from kept.storage.inspect import check
from kept.storage.segments import time_index


class Counted(list[Any]):
    """A list that counts how often somebody walks through it."""

    walks = 0

    def __iter__(self) -> Any:
        self.walks += 1
        return super().__iter__()


def test_a_time_index_is_compared_in_one_walk(tmp_path) -> None:
    """A segment of a gigabyte may have a million batches, and an entry for every fourth."""
    count = 2_000
    path = tmp_path / f"{0:020d}.timeindex"
    stamps, offsets = array("q", range(1, count)), array("i", range(count - 1))
    path.write_bytes(time_index.encode_entries(stamps, offsets))
    batches = Counted((n, n + 1 if n != 700 else 600) for n in range(count))
    segment = check._Segment(0, {}, batches, 0, {}, count)
    (finding,) = check.check_time_index(Disk(), str(path), segment, False)
    assert (finding.offset, finding.damaged) == (700, False)
    assert finding.why == "timestamp 701, the batches up to there reach 700"
    assert batches.walks <= 3
