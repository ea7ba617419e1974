"""What a node creates is for its user alone; what is there keeps its mode. An empty meta.properties
is refused with what to write into it.
"""

from __future__ import annotations

import os
import re
import stat

import pytest

from kept.storage.errors import DirectoryRefused
from kept.storage.records import CheckRules, build_batch, check
from kept.storage.types import TopicPartition


@pytest.fixture
def start(lone_node, tmp_path):
    """A node over the same directories each time."""

    def begin():
        return lone_node(log_dirs=str(tmp_path / "log"), metadata_log_dir=str(tmp_path / "meta"))

    return begin


def append(lone, roll: bool = False) -> None:
    partition = lone.node.parts.table.partition(TopicPartition("t", 0))
    partition.append(check(build_batch([(1000, b"k", b"v", ())]), CheckRules(), 1000), 1000)
    partition.write()
    if roll:
        partition.maybe_roll(1 << 60)


def modes(*roots: str) -> dict[str, int]:
    found = {}
    for root in roots:
        for directory, _, names in os.walk(root):
            for path in (directory, *(os.path.join(directory, name) for name in names)):
                found[path] = stat.S_IMODE(os.stat(path).st_mode)
    return found


def test_what_is_created_is_private_whatever_the_umask(start, tmp_path):
    before = os.umask(0)
    try:
        lone = start()
        lone.create("t")
        append(lone, roll=True)
        append(lone)
        lone.stop()
    finally:
        os.umask(before)
    found = modes(str(tmp_path / "log"), str(tmp_path / "meta"))
    assert len(found) > 12
    wrong = {
        path: oct(mode)
        for path, mode in found.items()
        if mode != (0o700 if os.path.isdir(path) else 0o600)
    }
    assert not wrong


def test_directories_and_files_of_before_are_opened_and_keep_their_mode(start, tmp_path):
    lone = start()
    lone.create("t")
    append(lone)
    lone.stop()
    for path in modes(str(tmp_path / "log"), str(tmp_path / "meta")):
        os.chmod(path, 0o755 if os.path.isdir(path) else 0o644)
    lone = start()
    append(lone)
    lone.stop()
    segment = str(tmp_path / "log" / "t-0" / f"{0:020d}.log")
    found = modes(str(tmp_path / "log"))
    assert (found[segment], found[str(tmp_path / "log" / "t-0")]) == (0o644, 0o755)


@pytest.mark.parametrize("content", ["", "version=1\nkept=1\n"])
def test_a_meta_properties_without_its_lines_is_refused_and_the_error_says_them(
    start, tmp_path, content
):
    lone = start()
    lone.create("t")
    append(lone)
    lone.stop()
    path = tmp_path / "log" / "meta.properties"
    right = path.read_text()
    path.write_text(content)
    with pytest.raises(DirectoryRefused, match=re.escape(str(path))) as refused:
        start()
    assert "None" not in str(refused.value)
    told = str(refused.value).partition("into it: ")[2].partition(". Remove")[0]
    given = dict(line.split("=", 1) for line in told.split(", "))
    kept = dict(line.split("=", 1) for line in right.splitlines())
    assert given | {"cluster.id": kept["cluster.id"]} == kept
    path.write_text(right)
    lone = start()
    append(lone)
    assert lone.node.parts.table.partition(TopicPartition("t", 0)).log.log_end_offset == 2
