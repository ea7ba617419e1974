"""What commands share: several names, the syntax of a partition, tables in a terminal."""

from __future__ import annotations

import click
import pytest

from kept.cli import output
from kept.cli.shell import NO_NODE, Failure, for_each
from kept.cli.topic_partition import PartitionCommand, TopicPartitionArgument
from kept.cli.unavailable import CommandClient, wait_reporter
from kept.client.bootstrap import Bootstrap
from kept.client.core.broker_errors import ConnectionRefused, NoNodeAnswers
from kept.client.security.security import Security
from kept.storage.errors import NotLeaderOrFollower, OffsetOutOfRange


def test_each_name_is_tried_and_each_failure_is_one_line(capfd):
    def action(name: str) -> str:
        if "bad" in name:
            raise Failure(f"no\n  {name}")
        return f"did {name}"

    assert for_each(["a", "bad", "b", "bad\x1b[2J"], action) == 1
    out, err = capfd.readouterr()
    assert out == "did a\ndid b\n"
    assert err == "kept: bad: no bad\nkept: bad\\u001b[2J: no bad\\u001b[2J\n"
    assert for_each(["a", "b", "a"], action) == 0
    assert capfd.readouterr().out == "did a\ndid b\n", "each once"
    with pytest.raises(Failure, match="no"):
        for_each(["bad"], action)


def test_where_nobody_is_the_other_names_are_not_tried(capfd):
    tried = []

    def action(name: str) -> None:
        tried.append(name)
        if name == "b":
            raise NoNodeAnswers("localhost:1: connection refused")

    with pytest.raises(Failure) as raised:
        for_each(["a", "b", "c", "d"], action)
    assert str(raised.value) == f"localhost:1: connection refused{NO_NODE} (not tried: c, d)"
    assert tried == ["a", "b"]
    assert capfd.readouterr() == ("", "")


def test_where_one_node_of_a_cluster_refuses_the_other_names_are_tried(capfd):
    def action(name: str) -> str:
        if name == "b":
            raise ConnectionRefused("node-2:9092: Fetch of b:0: connection refused")
        return f"did {name}"

    assert for_each(["a", "b", "c"], action) == 1
    said = "kept: b: node-2:9092: Fetch of b:0: connection refused\n"
    assert capfd.readouterr() == ("did a\ndid c\n", said)


def test_who_reads_on_elsewhere_tries_nothing_again(capfd):
    report = wait_reporter(Bootstrap("localhost:1"))
    for _ in range(2):
        report(NotLeaderOrFollower("a:0 has no leader"))
        report(OffsetOutOfRange("offset 2 of a:0 is not in its log any more; reading on from 5"))
    assert capfd.readouterr().err.splitlines() == [
        "kept: a:0 has no leader; still trying",
        "kept: offset 2 of a:0 is not in its log any more; reading on from 5",
    ]


def test_an_empty_list_says_who_may_not_describe_what_is_there():
    ada, nobody = CommandClient("n:1", security=Security()), CommandClient("n:1")
    ada.security.user = "ada"
    assert ada.none_of("topics") == "there are no topics that User:ada may describe"
    assert nobody.none_of("topics") == "there are no topics"
    token = CommandClient("n:1", security=Security())
    token.security.mechanism = "OAUTHBEARER"
    assert token.none_of("topics") == "there are no topics that this login may describe"


def parsed(arguments: list[str], *, whole_topic: bool = False) -> dict[str, object]:
    where = click.Argument(["where"], type=TopicPartitionArgument(whole_topic=whole_topic))
    offset = click.Argument(["offset"], type=int)
    key = click.Option(["--key"])
    command = PartitionCommand("why", params=[where, offset, key])
    return command.make_context("why", arguments).params


@pytest.mark.parametrize(
    "arguments",
    [
        ["--key", "k", "users:3", "42"],
        ["users:3", "--key", "k", "42"],
        ["users", "3", "42", "--key", "k"],
        ["--key", "k", "users", "3", "42"],
    ],
)
def test_one_syntax_of_a_partition_and_the_old_one(arguments):
    assert parsed(arguments) == {"where": ("users", 3), "offset": 42, "key": "k"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["users", "42"], "'users' names no partition: give TOPIC:PARTITION"),
        (["users:x", "42"], "'users:x' is neither TOPIC nor TOPIC:PARTITION"),
        ([":3", "42"], "':3' is neither TOPIC nor TOPIC:PARTITION"),
        (["users:3"], "Missing argument"),
        (["users:3", "1", "2"], "unexpected extra argument"),
    ],
)
def test_what_is_no_partition_is_named(arguments, said):
    with pytest.raises(click.UsageError) as raised:
        parsed(arguments)
    assert said in raised.value.format_message()


def test_a_whole_topic_where_that_will_do():
    assert parsed(["users", "42"], whole_topic=True)["where"] == ("users", None)


ROWS = [(3, "n" * 60, "why not " * 8), (40, "short", None)]


def test_in_a_pipe_a_row_is_a_line(capfdbinary, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    output.show_table(("partition", "name", "reason"), ROWS)
    out = capfdbinary.readouterr().out.decode().splitlines()
    assert len(out) == 3
    assert ROWS[0][1] in out[1] and ROWS[0][2].strip() in out[1]


@pytest.fixture
def shown_in_terminal(capfdbinary, monkeypatch):
    """The lines of the table in a terminal of that width."""

    def shown(width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(output.sys.stdout, "isatty", lambda: True)
        output.show_table(("partition", "name", "reason"), ROWS)
        return capfdbinary.readouterr().out.decode().splitlines()

    return shown


def test_a_table_fits_the_terminal_and_loses_nothing(shown_in_terminal):
    lines = shown_in_terminal(50)
    assert max(map(len, lines)) <= 50
    assert "".join(lines).count("n") >= 60
    assert " ".join(lines).split().count("why") == 8
    assert lines[0].split() == ["PARTITION", "NAME", "REASON"]
    assert len(shown_in_terminal(200)) == 3
