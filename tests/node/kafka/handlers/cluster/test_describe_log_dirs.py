"""DescribeLogDirs."""

import errno
import os

import pytest

from kept.storage.errors import MachineError


def dirs(lone, topics=None, version=5):
    if topics is not None:
        topics = [{"topic": name, "partitions": numbers} for name, numbers in topics.items()]
    answer = lone.ask(35, version, topics=topics)
    if version >= 3:
        assert answer.error_code.name == "none"
    return answer.results


@pytest.mark.parametrize("version", range(1, 6))
def test_every_partition_with_its_size(lone, version):
    lone.create("a", 2)
    lone.create("b")
    (result,) = dirs(lone, version=version)
    assert result.error_code.name == "none"
    assert result.log_dir == os.path.abspath(lone.node.config.log_dirs[0])
    sizes = {
        (topic.name, p.partition_index): (p.partition_size, p.offset_lag, p.is_future_key)
        for topic in result.topics
        for p in topic.partitions
    }
    assert sizes == dict.fromkeys((("a", 0), ("a", 1), ("b", 0)), (0, 0, False))
    if version >= 4:
        assert 0 < result.usable_bytes <= result.total_bytes


def test_only_what_is_asked(lone):
    lone.create("a", 2)
    (result,) = dirs(lone, {"a": [1, 99], "nope": [0]})
    ((topic, partitions),) = [(t.name, t.partitions) for t in result.topics]
    assert (topic, [p.partition_index for p in partitions]) == ("a", [1])
    (result,) = dirs(lone, {})
    assert result.topics == ()


def test_several_directories(lone_node, tmp_path):
    lone = lone_node()
    lone.stop()
    lone.stop = lambda: None
    two = f"{tmp_path}/d1,{tmp_path}/d2"
    from kept.node.config.node_config import NodeConfig
    from kept.node.node import Node

    config = NodeConfig.load(
        None, {"log.dirs": two, "metadata.log.dir": f"{tmp_path}/m"}, {}, port=0
    )

    async def start():
        node = Node(config)
        await node.start()
        return node

    lone.node = lone.run(start())
    try:
        lone.create("a", 4)
        placed = {
            os.path.basename(r.log_dir): sum(len(t.partitions) for t in r.topics)
            for r in dirs(lone)
        }
        assert placed == {"d1": 2, "d2": 2}
    finally:
        lone.run(lone.node.stop())


def test_an_offline_directory(lone_node, tmp_path):
    lone = lone_node()
    lone.create("a")
    directory = lone.node.parts.table.directories[0]
    directory.offline = str(MachineError("x", "write", OSError(errno.EIO, "I/O error")))
    (result,) = dirs(lone)
    assert result.error_code.name == "kafka_storage_error"
    assert (result.topics, result.total_bytes) == ((), -1)
    directory.offline = None
