"""Help, exit status, errors, and what a command may import."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys

import click
import pytest

from kept.cli import output
from kept.cli.root import kept as root
from kept.cli.shell import LazyGroup, examples
from tests.support.command_tree import walk

HEAVY = ("rich", "kio", "prometheus_client", "yaml", "uvloop", "kept.client", "kept.node")


PATHS = list(walk(root))


@pytest.mark.parametrize("path", PATHS, ids=lambda p: " ".join(p) or "kept")
def test_every_level_has_help_with_an_example(path, capsys):
    command: click.Command = root
    context = click.Context(root, info_name="kept")
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(context, name)
        assert found is not None
        command, context = found, click.Context(found, info_name=name, parent=context)
    text = command.get_help(context)
    assert "Example:" in text
    assert command.help, "says what it does"
    assert all(len(line) <= 80 for line in text.splitlines())
    for line in text.partition("Example:")[2].replace(" \\\n", " ").splitlines():
        assert not line.strip() or "kept " in line


def test_long_examples_go_on_in_another_line():
    """Before an option, outside of quotes; they can be copied as they are."""
    line = f"kept log dump a.log --json {'x' * 30} | jq 'select(.a) | .b --c {'d' * 20}'"
    first, second = examples(line).splitlines()[2:]
    assert first == f"  kept log dump a.log --json {'x' * 30} \\"
    assert second == f"      | jq 'select(.a) | .b --c {'d' * 20}'"


@pytest.mark.parametrize("name", [path[0] for path in PATHS if len(path) == 1])
def test_no_summary_of_a_command_is_cut_off(name):
    group = root.get_command(click.Context(root), name)
    if isinstance(group, click.Group):
        text = group.get_help(click.Context(group, info_name=name))
        assert not [line for line in text.splitlines()[1:] if line.endswith("...")]


def test_the_tree_of_commands_is_that_of_the_documents():
    names = {" ".join(p) for p in PATHS}
    assert names >= {
        "serve",
        "produce",
        "consume",
        "log dump",
        "log check",
        *(f"local {c}" for c in ("up", "status", "stop", "kill", "start", "down")),
        *(f"topic {c}" for c in ("create", "list", "describe", "alter", "delete")),
        *(f"group {c}" for c in ("list", "describe", "reset-offsets", "delete")),
        *(f"compact {c}" for c in ("status", "now", "explain", "why-missing", "retry")),
    }


def test_every_command_of_the_list_is_there_and_says_what_it_does():
    assert isinstance(root, LazyGroup)
    context = click.Context(root)
    for name, (_, said) in root.commands_at.items():
        command = root.get_command(context, name)
        assert command is not None
        assert said.endswith(".") and len(said) < 70, name
        assert command.name == name
        assert command.help, name


def imported_by(*arguments: str) -> set[str]:
    program = (
        "import sys, json\n"
        "from kept.cli.run import run\n"
        f"run({list(arguments)!r})\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("serve", "--help")])
def test_little_is_imported_for_little(arguments):
    loaded = imported_by(*arguments)
    assert [name for name in HEAVY if name in loaded] == []


def test_checking_settings_loads_no_client_and_no_output():
    loaded = imported_by("serve", "--check")
    unwanted = ("rich", "kio", "prometheus_client", "kept.client.core", "kept.cli.completion")
    assert [name for name in unwanted if name in loaded] == []


def test_version(offline):
    assert offline("--version").out.startswith("kept 0.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "No such command"),
        (["tpic", "list"], "Did you mean 'topic'?"),
        (["topic", "creat", "x"], "create"),
        (["topic", "create"], "Missing argument"),
        (["top", "--interval", "nan"], "'nan' is not 0.5 to 3600 seconds"),
        (["top", "--interval", "0.4"], "'0.4' is not 0.5 to 3600 seconds"),
        (["topic", "create", "x", "--config", "novalue"], "not KEY=VALUE"),
        (["topic", "create", "x", "--partitions", "0"], "0 is not in the range"),
        (["topic", "create", "x", "--partitions", "\uff12"], "is not a whole number"),
        (["topic", "create", "x", "--partitions", "1_0"], "'1_0' is not a whole number"),
        (["compact", "now", "a:\uff10"], "neither TOPIC nor"),
        (["cluster", "elect", "a:\uff10"], "neither TOPIC nor"),
        (["group", "reset-offsets", "g", "--topic", "t", "--to", "\u00b2"], "neither an offset"),
        (["compact", "status", "--bootstrap", "a:\uff11"], "not host:port"),
        (["topic", "alter", "x"], "nothing to alter"),
        (
            ["topic", "alter", "x", "--config", "a=1", "--delete-config", "a"],
            "both set and deleted",
        ),
        (["consume", "x", "--offset", "3"], "--offset N needs one TOPIC:PARTITION"),
        (["consume", "x", "--offset", "soon"], "neither an offset, -N"),
        (["consume", "x", "--offset", "@soon"], "'soon' is no time"),
        (["consume", "x", "--until", "2999-01-01"], "is in the future"),
        (["consume", "x", "--format", "%q"], "%q is no field: there are %t %p"),
        (["consume", "x", "--format", "%v\\q"], "\\q is no escape"),
        (["consume", "x", "--format", "%v", "--json"], "--json and --format contradict"),
        (["consume", "x", "--key-only", "--table"], "--key-only and --table contradict"),
        (["consume", "x:1", "--partition", "1"], "contradict"),
        (["consume", "x", "x"], "topic x is given twice"),
        (["consume", "x:1", "y", "x:1"], "x:1 is given twice"),
        (["consume", "x", "x:1"], "x:1 is given twice"),
        (["consume", "x:0", "x:1", "--offset", "3"], "--offset N needs one TOPIC:PARTITION"),
        (["consume", "(", "--regex"], "'(' is no regular expression"),
        (["consume", "x", "--internal"], "--internal needs --regex"),
        (["topics", "list"], "Did you mean 'topic'?"),
        (["up"], "No such command 'up'. Did you mean 'local up'?"),
        (["create", "users"], "No such command 'create'. Did you mean 'topic create'?"),
        (["delete", "users"], "Did you mean 'topic delete' or 'group delete' or 'user delete'"),
        (["consume", "x", "--table", "--max", "3"], "contradict"),
        (["consume", "x", "--group", "g", "--partition", "0"], "contradict"),
        (["produce", "x", "--json", "--key-separator", ":"], "--json excludes --key-separator"),
        (["group", "reset-offsets", "g", "--topic", "t", "--to", "soon"], "neither an offset"),
        (["compact", "now", "a:b"], "neither TOPIC nor"),
        (["compact", "retry", "a"], "names no partition"),
        (["compact", "status", "--bootstrap", "a:b"], "not host:port"),
        (["group", "list", "--state", "Emty"], "there is no state Emty; did you mean Empty?"),
        (["serve", "--port", "none"], "'none' is not a whole number"),
        (["local", "up", "--set", "node.id=3"], "sets node.id itself"),
    ],
)
def test_wrong_usage_is_status_2(offline, arguments, said):
    ran = offline(*arguments, status=2)
    assert said in ran.err
    assert "Usage:" in ran.err


@pytest.mark.parametrize(
    "arguments", [["topic", "list"], ["consume", "x"], ["group", "list"], ["compact", "status"]]
)
def test_nobody_there_is_one_line_and_status_1(offline, arguments):
    ran = offline(*arguments, status=1)
    assert "localhost:1" in ran.err
    assert "connection refused" in ran.err


def test_a_reader_that_leaves_is_no_error(kept, kept_broker):
    topic = kept_broker.create_topic()
    kept("produce", topic, stdin="x\n" * 20_000)
    with kept.started("consume", topic, "--from-beginning") as process:
        assert process.stdout.readline().endswith(b"x\n")
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""


def test_a_closed_output_is_named(kept):
    close = functools.partial(os.close, 1)
    with kept.started("topic", "list", stdout=None, preexec_fn=close) as process:
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, b"kept: standard output is closed\n")


def test_ctrl_c_is_quiet(kept, kept_broker):
    topic = kept_broker.create_topic()
    kept("produce", topic, stdin="x\n")
    with kept.started("consume", topic, "--from-beginning") as process:
        assert process.stdout.readline().endswith(b"x\n")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
        assert (process.returncode, out, err) == (130, b"", b"")


def test_term_that_was_blocked_makes_a_member_leave_its_group(kept, kept_broker):
    topic = kept_broker.create_topic()
    kept("produce", topic, stdin="x\n")
    consume = ("consume", topic, "--from-beginning", "--group", topic)
    block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM})

    def committed() -> bool:
        described = kept("group", "describe", topic, "--json").json
        return [partition["lag"] for partition in described["partitions"]] == [0]

    with kept.started(*consume, preexec_fn=block) as process:
        assert process.stdout.readline().endswith(b"x\n")
        # Python warns of the file of a module that it reads as the signal comes.
        kept_broker.wait_until(committed, "what was printed is committed")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (143, b"", b"")
    assert kept("group", "describe", topic, "--json").json["state"] == "Empty"


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (None, "none"),
        (b"", ""),
        ("žlutý 🐴".encode(), "žlutý 🐴"),
        (b"a\tb\n", "a\\tb\\n"),
        (b"\xff\0", "\\xff\\x00"),
        (b"\x1b[31m", "\\x1b[31m"),
    ],
)
def test_bytes_for_people_never_move_the_cursor(data, shown):
    assert output.text(data, "none") == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, None),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 30, "1.0 GiB"),
        (150 << 20, "150 MiB"),
    ],
)
def test_sizes(count, shown):
    assert output.size(count) == shown


def test_moments():
    assert output.moment(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"
    assert output.moment(-1) is None
    assert output.moment(2**62) == str(2**62)
