"""``kept produce`` and ``kept consume``: lines, JSON round trips, tables."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from kept.client.admin import transactions
from kept.client.client import OutRecord
from kept.client.partitioner import partition_for_key


def produced(kept_broker, topic):
    with kept_broker.client() as client:
        return sorted(client.read(topic), key=lambda r: (r.partition, r.offset))


def test_lines_are_values(kept, kept_broker):
    topic = kept_broker.create_topic()
    kept("produce", topic, stdin=b"one\r\ntwo\n\nlast \xff without newline")
    found = produced(kept_broker, topic)
    assert [(r.key, r.value) for r in found] == [
        (None, b"one"),
        (None, b"two"),
        (None, b""),
        (None, b"last \xff without newline"),
    ]


def test_nothing_is_nothing(kept, kept_broker):
    topic = kept_broker.create_topic()
    kept("produce", topic, stdin="")
    assert produced(kept_broker, topic) == []


def test_keys_and_tombstones(kept, kept_broker):
    topic = kept_broker.create_topic(partitions=4, config={"cleanup.policy": "compact"})
    stdin = "".join(f"k{n}::v:{n}\n" for n in range(40)) + "k7::NULL\n"
    kept("produce", topic, "--key-separator", "::", "--null-marker", "NULL", stdin=stdin)
    found = produced(kept_broker, topic)
    assert len(found) == 41
    for r in found:
        assert r.partition == partition_for_key(r.key, 4)
    assert [r.value for r in found if r.key == b"k7"] == [b"v:7", None]
    table = kept("consume", topic, "--table").lines
    assert len(table) == 1 + 39
    assert not any(line.startswith("k7 ") for line in table)
    as_json = [json.loads(line) for line in kept("consume", topic, "--table", "--json").lines]
    assert {r["key"]: r["value"] for r in as_json} == {
        f"k{n}": f"v:{n}" for n in range(40) if n != 7
    }


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compression(kept, kept_broker, codec):
    topic = kept_broker.create_topic()
    kept("produce", topic, "--compression", codec, "--acks", "1", stdin="same\n" * 1000)
    assert [r.value for r in produced(kept_broker, topic)] == [b"same"] * 1000


def test_a_json_round_trip_keeps_everything(kept, kept_broker):
    one = kept_broker.create_topic(partitions=3)
    two = kept_broker.create_topic(partitions=3)
    sent = [
        OutRecord(b"text", 'žluť\n\t"'.encode(), (("h", b"v"), ("h", None)), 1_700_000_000_000, 2),
        OutRecord(b"\xff\0", b"\xfe", (("", b"\xfd"),), 1_700_000_000_001, 1),
        OutRecord(None, None, (), 1_700_000_000_002, 0),
        OutRecord(b"", b"", (), 1_700_000_000_003, 0),
    ]
    with kept_broker.client() as client:
        client.produce(one, sent)
    lines = kept("consume", one, "--from-beginning", "--until-end", "--json").out
    kept("produce", two, "--json", stdin=lines)
    strip = lambda r: r._replace(topic="")  # noqa: E731
    assert list(map(strip, produced(kept_broker, two))) == list(
        map(strip, produced(kept_broker, one))
    )
    again = kept("consume", two, "--from-beginning", "--until-end", "--json").out
    assert sorted(again.replace(two, one).splitlines()) == sorted(lines.splitlines())


def test_json_values_that_are_not_text_are_written_as_json(kept, kept_broker):
    topic = kept_broker.create_topic()
    kept("produce", topic, "--json", stdin='{"key": 7, "value": {"a": [1, null, "ü"]}}\n')
    (record,) = produced(kept_broker, topic)
    assert (record.key, record.value) == (b"7", '{"a":[1,null,"ü"]}'.encode())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "line 2: "),
        ("[1]", "not a JSON object"),
        ('{"vlue": "x"}', "unknown field 'vlue'"),
        ('{"value_base64": "?"}', "line 2: "),
        ('{"value": "x", "value_base64": "eA=="}', "contradict"),
        ('{"value": "x", "timestamp": "now"}', "timestamp is not a whole number"),
        ('{"value": "x", "headers": ["h"]}', "headers are objects"),
    ],
)
def test_json_that_is_wrong_is_named_by_line(kept, kept_broker, line, said):
    topic = kept_broker.create_topic()
    ran = kept("produce", topic, "--json", stdin=f'{{"value": "ok"}}\n{line}\n', status=1)
    assert said in ran.err


def test_a_line_without_separator_is_named(kept, kept_broker):
    topic = kept_broker.create_topic()
    ran = kept("produce", topic, "--key-separator", ":", stdin="a:1\nb\n", status=1)
    assert "line 2 has no key separator ':'" in ran.err


def test_no_key_in_a_compacted_topic(kept, kept_broker):
    topic = kept_broker.create_topic(config={"cleanup.policy": "compact"})
    assert "INVALID_RECORD" in kept("produce", topic, stdin="x\n", status=1).err


def test_where_and_how_much(kept, kept_broker):
    topic = kept_broker.create_topic(partitions=2)
    kept("produce", topic, "--partition", 1, stdin="".join(f"{n}\n" for n in range(10)))
    part = ("consume", topic, "--partition", 1, "--value-only")
    assert kept(*part, "--offset", 7, "--max", 2).lines == ["7", "8"]
    assert kept(*part, "--from-beginning", "--until-end").lines == [str(n) for n in range(10)]
    assert kept("consume", topic, "--partition", 0, "--from-beginning", "--until-end").out == ""
    assert kept("consume", topic, "--until-end", "--offset", "latest").out == ""
    assert len(kept("consume", topic, "--until-end").lines) == 10, "from the first record on"
    line = kept("consume", topic, "--from-beginning", "--max", 1).out
    assert line.startswith("1:0  20")
    assert line.endswith("(no key)  0\n")
    assert "partitions 0 to 1" in kept("consume", topic, "--partition", 9, status=1).err
    assert "nope" in kept("consume", "nope", "--until-end", status=1).err


def test_an_offset_that_is_not_there_is_said(kept, kept_broker):
    topic = kept_broker.create_topic()
    kept("produce", topic, stdin="".join(f"{n}\n" for n in range(10)))
    part = ("consume", topic, "--partition", 0, "--value-only")
    ran = kept(*part, "--offset", 11, "--until-end", status=1)
    assert ran.out == ""
    assert f"offset 11 is above the end of {topic}:0, which is 10" in ran.err
    at_the_end = kept(*part, "--offset", 10, "--until-end")
    assert (at_the_end.out, at_the_end.err) == ("", "")

    with kept.started(*part, "--offset", 99, "--max", 1, text=True) as waiting:
        assert "which is 10; waiting for records from the end on" in waiting.stderr.readline()
        sent = 0
        while waiting.poll() is None:  # it looks the end up in its own time
            kept("produce", topic, stdin=f"late {sent}\n")
            sent += 1
            assert sent < 60
        out, more = waiting.communicate(timeout=200)
    assert waiting.returncode == 0
    assert out.startswith("late ")
    assert more == "", "it is said once"

    with kept_broker.client() as client:
        client.request(
            21,
            {
                "topics": [{"name": topic, "partitions": [{"partition_index": 0, "offset": 5}]}],
                "timeout": 10_000,
            },
        )
    ran = kept(*part, "--offset", 2, "--until-end")
    assert ran.lines[0] == "5"
    assert ran.err == f"kept: offset 2 is below the log start of {topic}:0; reading from 5 on\n"


def test_a_table_says_what_would_mislead(kept, kept_broker):
    topic = kept_broker.create_topic(partitions=2)
    with kept_broker.client() as client:
        client.produce(topic, [OutRecord(b"k", b"1", partition=0), OutRecord(None, b"x")])
        client.produce(topic, [OutRecord(b"k", b"2", partition=1)])
    ran = kept("consume", topic, "--table")
    assert "1 record without a key is not in the table" in ran.err
    assert "in more than one partition" in ran.err


def test_large_input_arrives_whole(kept, kept_broker):
    topic = kept_broker.create_topic()
    lines = [f"{n}:{'x' * (n % 3000)}" for n in range(3000)]
    kept("produce", topic, "--key-separator", ":", stdin="\n".join(lines))
    found = produced(kept_broker, topic)
    assert [f"{r.key.decode()}:{r.value.decode()}" for r in found] == lines


@pytest.mark.parametrize(
    "options", [("--header", "traceparent=" + "x" * 55), ("--key", "k" * 200, "--header", "a=b")]
)
def test_many_short_lines_with_much_around_them_go_in_batches_that_are_taken(
    kept, kept_broker, options
):
    topic = kept_broker.create_topic()
    kept("produce", topic, *options, stdin="x\n" * 40_000)
    with kept_broker.client() as client:
        assert client.bounds(topic)[0][1] == 40_000


def ids(cluster) -> dict[str, str]:
    """Transactional ids that begin with ``cli-``, and their states."""
    silent: list[int] = []
    with cluster.client() as client:
        found = client.run(transactions.list_transactions(silent, 3_000))
    return {t.transactional_id: t.state for t in found if t.transactional_id.startswith("cli-")}


def test_one_run_is_one_transaction(kept, kept_broker):
    topic = kept_broker.create_topic(partitions=2)
    both = ("consume", topic, "--from-beginning", "--until-end", "--value-only")
    lines = [f"{n}:{'x' * (n % 2000)}" for n in range(800)]  # of two batches
    stdin = "\n".join(lines)
    once = ("produce", topic, "--key-separator", ":", "--transactional-id", "cli-one")
    kept(*once, stdin=stdin)
    assert len(kept(*both, "--isolation", "read_committed").lines) == 800
    ran = kept(*once, stdin=f"{stdin}\nwithout separator\n", status=1)
    assert "line 801 has no key separator ':' (nothing is written: the transaction" in ran.err
    assert len(kept(*both, "--isolation", "read_committed").lines) == 800
    assert len(kept(*both, "--read-committed").lines) == 800
    aborted = len(kept(*both, "--isolation", "read_uncommitted").lines) - 800
    assert aborted == 800 and len(kept(*both).lines) == 800 + aborted
    kept(*once, stdin="a:b\n", status=0)
    assert len(kept(*both, "--isolation", "read_committed").lines) == 801
    kept("produce", topic, "--transactional-id", "cli-nothing", stdin="")
    assert ids(kept_broker) == {"cli-one": "CompleteCommit", "cli-nothing": "Empty"}


def test_a_run_that_is_fenced_or_interrupted_writes_nothing(kept, kept_broker):
    topic = kept_broker.create_topic()
    once = ("produce", topic, "--transactional-id", "cli-two")
    committed = ("consume", topic, "--from-beginning", "--until-end", "--isolation")

    def begun(process):
        process.stdin.write("first\n")
        process.stdin.flush()
        kept_broker.wait_until(
            lambda: ids(kept_broker).get("cli-two") == "Ongoing", "the transaction is open"
        )
        kept_broker.wait_until(
            lambda: bool(kept(*committed, "read_uncommitted").lines), "its record is there"
        )

    with kept.started(*once, stdin=subprocess.PIPE, text=True) as old:
        begun(old)
        kept(*once, stdin="second\n")
        out, err = old.communicate("third\n", timeout=60)
    assert (old.returncode, out) == (1, "")
    assert err.startswith("kept: ") and "another producer has that id now, or it took" in err
    assert "(nothing is written: the transaction is aborted, for" in err
    assert [line.split()[-1] for line in kept(*committed, "read_committed").lines] == ["second"]
    with kept.started(*once, stdin=subprocess.PIPE, text=True) as interrupted:
        begun(interrupted)
        interrupted.send_signal(signal.SIGINT)
        assert interrupted.wait(60) == 130
    assert ids(kept_broker)["cli-two"] == "CompleteAbort"
    assert len(kept(*committed, "read_committed").lines) == 1


@pytest.mark.parametrize(
    "options, status, said",
    [
        (("--transactional-id", ""), 2, "--transactional-id is empty"),
        (("--transactional-id", "cli-x", "--acks", "1"), 2, "needs --acks all, not 1"),
        (("--transaction-timeout", "9"), 2, "--transaction-timeout needs --transactional-id"),
        (
            ("--transactional-id", "cli-x", "--transaction-timeout", "1000"),
            1,
            "InitProducerId of cli-x: INVALID_TRANSACTION_TIMEOUT (the timeout is above the "
            "node's transaction.max.timeout.ms)",
        ),
    ],
)
def test_what_transactional_ids_refuse(kept, kept_broker, options, status, said):
    ran = kept("produce", kept_broker.create_topic(), *options, stdin="x\n", status=status)
    assert said in ran.err
