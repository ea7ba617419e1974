"""What ``kept produce`` makes of its input, what it says when it fails, and topics that are not
there.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time

import pytest

from kept.cli.commands.produce import _bounded, _Shape
from kept.cli.run import _Termination
from kept.cli.shell import Failure
from kept.client.partitioner import partition_for_key


def records(kept_broker, topic):
    with kept_broker.client() as client:
        return [(r.key, r.value, r.headers) for r in client.read(topic)]


def test_keys_headers_tabs_and_files(kept, kept_broker, tmp_path):
    topic = kept_broker.create_topic()
    kept("produce", topic, "--key", "k", "--header", "a=1", "--header", "a=", stdin="v\n")
    kept("produce", topic, "--key-separator", "\\t", stdin="tab\tv\\t\n")
    kept("produce", topic, "--key-separator", "\\x3a\\x3a", stdin="colons::v\n")
    (tmp_path / "two").write_bytes(b"two\nlines\r\n")
    files = ("--file", "two", "--file", "-", "--key", "f", "--header", "name=x")
    kept("produce", topic, *files, stdin=b"\0in\nput", cwd=tmp_path)
    headers = (("name", b"x"),)
    assert records(kept_broker, topic) == [
        (b"k", b"v", (("a", b"1"), ("a", b""))),
        (b"tab", b"v\\t", ()),
        (b"colons", b"v", ()),
        (b"f", b"two\nlines\r\n", headers),
        (b"f", b"\0in\nput", headers),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--key", "k", "--key-separator", ":"), "--key and --key-separator contradict"),
        (("--repartition",), "--repartition needs --json"),
        (("--json", "--repartition", "--partition", "1"), "excludes a partition for all"),
        (("--json", "--key", "k"), "--json excludes --key-separator, --key"),
        (("--file", "/", "--key", "k"), "is a directory"),
        (("--file", "nope"), "does not exist"),
        (("--file", "-", "--json"), "--file excludes"),
        (("--header", "novalue"), "'novalue' is not KEY=VALUE"),
        (("--key-separator", "\\q"), "\\q is no escape"),
        (("--key-separator", ""), "--key-separator is empty"),
    ],
)
def test_what_is_refused(offline, options, said):
    assert said in offline("produce", "x", *options, status=2).err


def test_an_error_says_which_lines_are_written(kept, kept_broker):
    topic = kept_broker.create_topic()
    keyed = ("produce", topic, "--key-separator", ":")
    lines = "".join(f"{n}:{'x' * 5000}\n" for n in range(1, 301))  # of several batches
    ran = kept(*keyed, stdin=f"{lines}no separator\n{lines}", status=1)
    assert ran.err == (
        "kept: line 301 has no key separator ':' (lines 1 to 300 are written; go on with line 301: "
        "tail -n +301)\n"
    )
    found = records(kept_broker, topic)
    assert [key for key, _, _ in found] == [b"%d" % n for n in range(1, 301)]
    assert "(nothing is written)" in kept(*keyed, stdin="x\n", status=1).err
    assert "(line 1 is written; go on with line 2" in kept(*keyed, stdin="a:\nx\n", status=1).err


def test_a_refused_batch_is_told_apart_from_what_is_written(kept, kept_broker):
    topic = kept_broker.create_topic(config={"cleanup.policy": "compact"})
    rows = '{"key": "a", "value": "x"}\n' * 3
    ran = kept("produce", topic, "--json", stdin=rows + '{"value": "x"}\n', status=1)
    assert ran.err.endswith("(nothing is written)\n"), "a batch is whole"
    many = kept_broker.create_topic(partitions=3, config={"cleanup.policy": "compact"})
    keyed = "".join(f'{{"key": "{n}", "value": "x"}}\n' for n in range(20)) + '{"value": "x"}\n'
    ran = kept("produce", many, "--json", stdin=keyed, status=1)
    assert "(of lines 1 to 21 some may be written)" in ran.err


def test_batches_above_the_limits_of_the_topic_are_split(kept, kept_broker):
    topic = kept_broker.create_topic(config={"max.message.bytes": "10000"})
    lines = "".join(f"{n} {'x' * 2000}\n" for n in range(300))
    for options in ((), ("--acks", "1"), ("--transactional-id", topic)):
        kept("produce", topic, *options, stdin=lines)
    found = [value for _, value, _ in records(kept_broker, topic)]
    assert found == [line.encode() for line in lines.splitlines()] * 3


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_refusal_in_the_middle_of_a_split_says_which_lines_are_written(
    kept, kept_broker, partitions
):
    config = {"cleanup.policy": "compact", "max.message.bytes": "10000"}
    topic = kept_broker.create_topic(partitions=partitions, config=config)
    line = f'{{"key": "a", "value": "{"x" * 900}"}}'
    lines = [line] * 33 + ['{"value": "x", "partition": 0}'] + [line] * 6
    ran = kept(
        "produce", topic, "--json", "--partition", "0", stdin="\n".join([*lines, ""]), status=1
    )
    count = len(records(kept_broker, topic))
    assert 10 <= count <= 33
    assert "INVALID_RECORD" in ran.err and ran.err.endswith(
        f"(lines 1 to {count} are written, lines {count + 1} to 40 are not; "
        f"go on with line {count + 1}: tail -n +{count + 1})\n"
    )


def test_a_line_that_is_too_large_is_named(kept, kept_broker):
    topic = kept_broker.create_topic(config={"max.message.bytes": "10000"})
    small, large = "small\n" * 300, "x" * 20_000
    lines = f"{small}{large}\n{small}"
    ran = kept("produce", topic, stdin=lines, status=1)
    assert ran.err.startswith(f"kept: line 301: Produce to {topic}:0: MESSAGE_TOO_LARGE (")
    said = "(lines 1 to 300 are written, lines 301 to 601 are not; go on with line 301: tail -n"
    assert said in ran.err
    assert len(records(kept_broker, topic)) == 300
    ran = kept("produce", topic, stdin=large, status=1)
    assert "kept: line 1: Produce to" in ran.err and "(nothing is written)" in ran.err
    ran = kept("produce", topic, "--transactional-id", topic, stdin=lines, status=1)
    assert "kept: line 301: Produce to" in ran.err
    assert "(nothing is written: the transaction is aborted)" in ran.err


def test_a_line_that_is_too_large_among_partitions(kept, kept_broker):
    topic = kept_broker.create_topic(partitions=2, config={"max.message.bytes": "10000"})
    sizes = [(0, 9), (1, 9), (0, 20_000), (1, 9), (0, 9), (1, 9)]
    rows = "".join(f'{{"value": "{"x" * size}", "partition": {p}}}\n' for p, size in sizes)
    ran = kept("produce", topic, "--json", stdin=rows, status=1)
    assert ran.err.startswith(f"kept: line 3: Produce to {topic}:0: MESSAGE_TOO_LARGE (")
    assert ran.err.endswith(
        "(lines 1 to 6 are written, except 3 and 5; go on with these, then with line 7)\n"
    )
    assert len(records(kept_broker, topic)) == 4


def test_a_partition_that_is_not_there_is_named_before_anything_goes_to_it(kept, kept_broker):
    topic = kept_broker.create_topic(partitions=3)
    rows = "".join(f'{{"value": "{n}", "partition": {n}}}\n' for n in (0, 1, 7, 2))
    ran = kept("produce", topic, "--json", stdin=rows, status=1)
    assert ran.err == (
        f"kept: line 3: there is no {topic}:7: topic {topic} has partitions 0 to 2 (lines 1 to 2 "
        "are written; go on with line 3: tail -n +3)\n"
    )
    assert sorted(value for _, value, _ in records(kept_broker, topic)) == [b"0", b"1"]
    ran = kept("produce", topic, "--partition", "3", stdin="a\nb\n", status=1)
    assert ran.err.startswith(f"kept: line 1: there is no {topic}:3")
    assert ran.err.endswith("(nothing is written)\n")
    ran = kept("produce", topic, "--json", "--transactional-id", topic, stdin=rows, status=1)
    assert f"line 3: there is no {topic}:7" in ran.err
    assert "(nothing is written: the transaction is aborted)" in ran.err


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"value": "x", "headers": 5}', "headers are a list of objects"),
        ('{"value": "x", "headers": {"a": "b"}}', "headers are a list of objects"),
        ('{"value": "x", "headers": ["a"]}', "headers are objects with key and value"),
        (r'{"value": "x", "headers": [{"key": "\ud800"}]}', "is not Unicode text"),
        (
            '{"value": "x", "timestamp": 9223372036854775808}',
            "timestamp 9223372036854775808 is not",
        ),
        ('{"value": "x", "timestamp": -2}', "timestamp -2 is not in the range from -1"),
        ('{"value": "x", "timestamp": "now"}', "timestamp is not a whole number"),
        ('{"value": "x", "partition": 2147483648}', "partition 2147483648 is not in the range"),
        ('{"value": "x", "partition": -1}', "partition -1 is not in the range from 0"),
        ('{"value": "x", "key_base64": "zzz"}', "key_base64 is no base64: Incorrect padding"),
        ('{"value": ' + "[" * 100_000, "it is nested too deeply"),
    ],
)
def test_a_row_that_is_no_record_is_named(row, said):
    shape = _Shape(
        separator=None,
        key=None,
        null=None,
        headers=(),
        partition=None,
        as_json=True,
        repartition=False,
    )
    batches = _bounded([b'{"value": "y"}', row.encode()], 4, shape)
    assert [record.value for record in next(batches)] == [b"y"]
    with pytest.raises(Failure) as raised:
        next(batches)
    assert str(raised.value).startswith("line 5: ") and said in str(raised.value)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_an_interrupted_run_says_how_far_it_came(kept, kept_broker, number, status):
    topic = kept_broker.create_topic()
    with kept.started("produce", topic, stdin=subprocess.PIPE, text=True) as process:
        process.stdin.write("one\ntwo\n")
        process.stdin.flush()
        kept_broker.wait_until(lambda: len(records(kept_broker, topic)) == 2, "two records")
        process.send_signal(number)
        if number == signal.SIGTERM:
            process.send_signal(number)  # timeout sends two
        _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert err in (
        "kept: interrupted: lines 1 to 2 are written; go on with line 3: tail -n +3\n",
        "kept: interrupted: of lines 1 to 2 some may be written\n",  # the answer was on its way
    )


@pytest.mark.parametrize("came", [False, True])
def test_a_late_term_does_not_change_the_status(came):
    before = signal.getsignal(signal.SIGTERM)
    termination = _Termination()
    try:
        termination.begin()
        if came:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        termination.end()
        assert signal.getsignal(signal.SIGTERM) == (signal.SIG_IGN if came else before)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_term_aborts_the_transaction(kept, kept_broker):
    topic = kept_broker.create_topic()
    produce = ("produce", topic, "--transactional-id", topic)
    with kept.started(*produce, stdin=subprocess.PIPE, text=True) as process:
        process.stdin.write("one\n")
        process.stdin.flush()
        kept_broker.wait_until(lambda: len(records(kept_broker, topic)) == 1, "a record")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, "")
    assert kept("transaction", "describe", topic, "--json").json["state"] == "CompleteAbort"


def test_a_topic_that_is_not_there(kept, kept_broker):
    name = f"orders{time.time_ns()}"
    ran = kept("produce", name, stdin="x\n", status=1)
    assert ran.err.startswith(f"kept: no topic {name}") and "(--create creates it)" in ran.err
    assert kept("produce", name, "--no-create", stdin="x\n", status=1).err == ran.err
    assert name not in kept("topic", "list").out
    ran = kept("produce", name, "--create", stdin="x\n")
    assert ran.err == f"created topic {name} with 1 partition\n"
    assert kept("produce", name, "--create", stdin="y\n").err == ""
    assert [value for _, value, _ in records(kept_broker, name)] == [b"x", b"y"]
    typo = f"{name[:-1]}x"
    said = f"no topic {typo}; did you mean {name}? (--create creates it)"
    assert said in kept("produce", typo, stdin="x\n", status=1).err
    transactional = ("produce", typo, "--transactional-id", f"t-{name}")
    assert said in kept(*transactional, stdin="x\n", status=1).err


@pytest.mark.parametrize(("answer", "is_created"), [("y\n", True), ("\n", False), ("no\n", False)])
def test_a_terminal_is_asked_while_the_records_come_from_a_pipe(
    kept, kept_broker, answer, is_created
):
    name = f"asked{time.time_ns()}"
    child, terminal = pty.fork()
    if not child:
        read, write = os.pipe()
        os.write(write, b"record\n")
        os.close(write)
        os.dup2(read, 0)
        command = kept.command("produce", name)
        os.execve(command[0], command, kept.environ)
    shown = b""
    try:
        while b"[y/N]" not in shown:
            shown += os.read(terminal, 4096)
        os.write(terminal, answer.encode())
        while True:
            shown += os.read(terminal, 4096)
    except OSError:
        pass  # it has ended
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = shown.decode()
    assert f"no topic {name}" in said
    assert (status == 0) is is_created, said
    assert (f"created topic {name} with 1 partition" in said) is is_created
    assert ("1 record written to" in said) is is_created
    assert (name in kept("topic", "list").out) is is_created


def test_a_copy_with_another_number_of_partitions(kept, kept_broker):
    topic = kept_broker.create_topic(partitions=3)
    copy = kept_broker.create_topic(partitions=2)
    lines = "".join(f"{n}:v\n" for n in range(20))
    kept("produce", topic, "--key-separator", ":", stdin=lines)
    rows = kept("consume", topic, "--until-end", "--json").out
    said = f"there is no {copy}:2: topic {copy} has partitions 0 to 1"
    assert said in kept("produce", copy, "--json", stdin=rows, status=1).err
    other = kept_broker.create_topic(partitions=2)
    kept("produce", other, "--json", "--repartition", stdin=rows)
    with kept_broker.client() as client:
        found = [(r.key, r.partition) for r in client.read(other)]
    assert len(found) == 20
    assert all(partition == partition_for_key(key, 2) for key, partition in found)
