"""Every command with bad input: one plain line that names it, and the right exit status.

A command that is not in the tables below fails here.
"""

from __future__ import annotations

import io
import os
import sys

import click
import pytest

from kept.cli.root import kept as root
from kept.cli.run import run
from tests.support.command_tree import leaves

COMMANDS = leaves(root)
NOWHERE = "/no/such/place"
UNKNOWN = {
    "serve": ("--config-file", NOWHERE),
    "local status": ("--dir", NOWHERE),
    "local stop": ("7", "--dir", NOWHERE),
    "local kill": ("7", "--dir", NOWHERE),
    "local start": ("7", "--dir", NOWHERE),
    "local down": ("--dir", NOWHERE),
    "topic create": ("a/b",),
    "topic describe": ("nope",),
    "topic alter": ("nope", "--config", "retention.ms=1"),
    "topic delete": ("nope",),
    "topic delete-records": ("nope:0", "--before", "1"),
    "produce": ("nope",),
    "consume": ("nope", "--until-end"),
    "group describe": ("nope",),
    "group reset-offsets": ("nope", "--topic", "nope", "--to", "earliest"),
    "group seek": ("nope", "--all-topics", "--to", "earliest"),
    "group export-offsets": ("nope",),
    "group delete-offsets": ("nope", "nope:0"),
    "group delete": ("nope",),
    "transaction describe": ("nope",),
    "transaction hanging": ("--topic", "nope"),
    "transaction abort": ("nope:0", "--start-offset", "0"),
    "transaction fence": ("nope",),
    "user passwd": ("nope",),
    "user delete": ("nope",),
    "acl delete": ("User:nope", "read", "topic:nope"),
    "quota delete": ("--user", "nope"),
    "broker config describe": ("77",),
    "broker config set": ("77", "--config", "log.cleaner.threads=2"),
    "broker config delete": ("77", "--name", "log.cleaner.threads"),
    "compact status": ("nope",),
    "compact now": ("nope:0",),
    "compact explain": ("nope",),
    "compact why-missing": ("nope:0", "1"),
    "compact lost": ("nope",),
    "compact retry": ("nope:0",),
    "compact verify": ("nope",),
    "cluster voter add": ("77",),
    "cluster voter remove": ("77",),
    "cluster elect": ("nope",),
    "cluster reassign": ("nope:0", "--to", "0"),
    "cluster drain": ("77",),
    "cluster unregister": ("77",),
    "spark table": ("nope",),
    "spark analyze": ("nope",),
    "spark audit": ("nope",),
    "spark export": ("nope", "new-directory"),
    "spark restore": (NOWHERE, "again"),
    "spark compact": (NOWHERE, "new-directory"),
    "context show": ("nope",),
    "context use": ("nope",),
    "context remove": ("nope",),
    "log dump": (NOWHERE,),
    "log check": (NOWHERE,),
}
"""By command, well-formed arguments that name what there is not."""
ALONE = {
    "acl delete": "no broker asks them: set authorizer.class.name",
    "cluster voter add": "node 0 runs alone",
    "cluster voter remove": "node 0 runs alone",
}
"""What a lone node without an authorizer answers, whatever is named."""
NAMELESS = {
    "local up": (),
    "topic list": (),
    "group list": (),
    "transaction list": (),
    "user add": ("ada",),
    "user list": (),
    "acl add": ("User:ada", "read", "topic:orders"),
    "acl list": (),
    "acl check": ("User:ada", "read", "topic:orders"),
    "quota set": ("--user", "ada", "--producer-byte-rate", "1MiB"),
    "quota list": (),
    "quota describe": (),
    "cluster status": (),
    "top": ("--once",),
    "context list": (),
    "context add": ("here", "--bootstrap", "localhost:9092"),
    "completion": ("bash",),
}
"""Those that name nothing which has to be there."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """No context, no variable and no input of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("KEPT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.chdir(tmp_path)


def cases(names):
    """As parameters; what imports PySpark is slow."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith("spark ") else [])
        for name in names
    ]


def reaches_a_cluster(command: click.Command) -> bool:
    options = [option for each in command.params for option in each.opts]
    return "--bootstrap" in options and "--context" in options


def test_the_tables_have_every_command():
    assert sorted(COMMANDS) == sorted({**UNKNOWN, **NAMELESS})


@pytest.mark.parametrize("name", cases(UNKNOWN))
def test_what_is_not_there_is_one_line_and_status_1(name, kept_broker, capfd):
    cluster = ["--bootstrap", kept_broker.bootstrap] if reaches_a_cluster(COMMANDS[name]) else []
    assert run([*name.split(), *UNKNOWN[name], *cluster]) == 1
    told = capfd.readouterr().err
    (line,) = told.splitlines()
    assert line.startswith("kept: ") and len(line) > 20
    assert "Traceback" not in told and "Error(" not in told
    given = " ".join(UNKNOWN[name])
    wrong = next(word for word in ("nope", "77", NOWHERE, "a/b") if word in given)
    assert ALONE.get(name, wrong) in line, "the line names what is wrong"


@pytest.mark.parametrize(
    "name", cases(name for name, command in COMMANDS.items() if reaches_a_cluster(command))
)
def test_a_cluster_that_is_not_there_is_one_line_and_status_1(name, capfd):
    arguments = {**UNKNOWN, **NAMELESS}[name]
    assert run([*name.split(), *arguments, "--bootstrap", "localhost:1"]) == 1
    told = capfd.readouterr().err
    (line,) = told.splitlines()
    assert line.startswith("kept: ")
    if NOWHERE not in arguments:
        assert "localhost:1" in line and "no node is there" in line


@pytest.mark.parametrize("name", cases(COMMANDS))
def test_wrong_usage_is_status_2_and_shows_the_usage(name, capfd):
    command = COMMANDS[name]
    assert run([*name.split(), "--no-such-option"]) == 2
    told = capfd.readouterr().err
    assert (
        told.startswith(f"Usage: kept {name} ")
        and "No such option" in told
        and "--no-such-option" in told
    )
    if any(isinstance(each, click.Argument) and each.required for each in command.params):
        assert run(name.split()) == 2
        assert "Missing argument" in capfd.readouterr().err
