"""A log directory that is broken when the node starts: it serves what is on the others."""

from __future__ import annotations

import errno
import os

import pytest

from kept.node.metadata.directory_ids import FILE
from kept.storage.checkpoints import read_properties
from kept.storage.disk import Disk
from kept.storage.errors import DirectoryRefused, KafkaStorageError, MachineError
from kept.storage.records import CheckRules, build_batch, check
from kept.storage.types import TopicPartition

CALLS = ("read", "lock", "listdir")
"""What fails: the first look, the opening, and the search for logs that follows."""


class Site:
    """A node over two log directories, with four logs in each."""

    def __init__(self, lone_node, tmp_path, monkeypatch) -> None:
        self.first, self.second = (str(tmp_path / name) for name in "ab")
        self.meta = str(tmp_path / "meta")
        self._start, self._patch = lone_node, monkeypatch
        lone = self.start()
        lone.create("t", partitions=8)
        for number in range(8):
            self.append(lone, number)
        self.on_first = {p for p in range(8) if os.path.isdir(f"{self.first}/t-{p}")}
        assert len(self.on_first) == 4
        self.known = read_properties(Disk({}), f"{self.meta}/{FILE}")
        lone.stop()

    def start(self):
        dirs = f"{self.first},{self.second}"
        return self._start(log_dirs=dirs, metadata_log_dir=self.meta)

    def append(self, lone, number: int) -> None:
        partition = lone.node.parts.table.partition(TopicPartition("t", number))
        partition.append(check(build_batch([(1000, b"k", b"v", ())]), CheckRules(), 1000), 1000)
        partition.write()

    def break_first(self, call: str, *more: str) -> None:
        """From now on one call fails below the first directory, and below ``more``."""
        real = getattr(Disk, call)

        def failing(disk, path, *arguments):
            for one in (self.first, *more):
                if path == one or path.startswith(f"{one}/"):
                    raise MachineError(path, call, OSError(errno.EIO, "I/O error"))
            return real(disk, path, *arguments)

        self._patch.setattr(Disk, call, failing)

    def mend(self) -> None:
        self._patch.undo()


@pytest.fixture
def site(lone_node, tmp_path, monkeypatch):
    return Site(lone_node, tmp_path, monkeypatch)


@pytest.mark.parametrize("call", CALLS)
def test_the_node_serves_what_the_others_hold_and_says_what_it_cannot(site, call, capfd):
    site.break_first(call)
    lone = site.start()
    offline = {one.name: one.offline for one in lone.node.parts.table.directories}
    assert "I/O error" in offline[site.first] and offline[site.second] is None
    assert f'event="log directory offline" path={site.first}' in capfd.readouterr().err
    for number in range(8):
        tp = TopicPartition("t", number)
        if number not in site.on_first:
            assert lone.node.parts.table.partition(tp).log.log_end_offset == 1
            site.append(lone, number)
            continue
        with pytest.raises(
            KafkaStorageError, match=f"t:{number}: .* one is offline: .*I/O.*; the node's log has"
        ) as refused:
            lone.node.parts.table.partition(tp)
        assert site.first not in str(refused.value)
        assert not os.path.exists(f"{site.second}/t-{number}"), "an empty one took its place"
    status, _, body = lone.http("GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status == 503 and site.first.encode() in body
    assert read_properties(Disk({}), f"{site.meta}/{FILE}") == site.known


@pytest.mark.parametrize("call", CALLS)
def test_once_it_is_mended_everything_is_there(site, call):
    site.break_first(call)
    site.start().stop()
    site.mend()
    lone = site.start()
    ends = [
        lone.node.parts.table.partition(TopicPartition("t", p)).log.log_end_offset for p in range(8)
    ]
    assert ends == [1] * 8
    assert [one.offline for one in lone.node.parts.table.directories] == [None, None]


def test_new_topics_go_to_the_others(site):
    site.break_first("read")
    lone = site.start()
    lone.create("u", partitions=3)
    assert all(os.path.isdir(f"{site.second}/u-{number}") for number in range(3))


def test_without_any_it_does_not_start(site):
    site.break_first("lock", site.second)
    with pytest.raises(MachineError, match=f"{site.first}.*I/O error"):
        site.start()


def test_one_that_is_not_mounted_is_still_refused(site):
    os.rename(site.second, f"{site.second}-elsewhere")
    site.break_first("read")
    with pytest.raises(DirectoryRefused, match=f"last seen at {site.second}, is not in log.dirs"):
        site.start()
