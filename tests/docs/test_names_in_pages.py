"""Pages name commands, options, settings and metrics that are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kept.cli.root import kept
from kept.node.config.definitions import BROKER_SETTINGS, TOPIC_SETTINGS
from kept.node.config.node_config import NodeConfig
from kept.node.metrics.definitions import TABLE
from kept.storage.errors import ConfigurationError
from tests.docs.blocks import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
PARTS = {"counter": ("_total",), "gauge": ("",), "histogram": ("", "_bucket", "_sum", "_count")}
METRICS = {f"kept_{row.name}{part}" for row in TABLE for part in PARTS[row.kind]}
NO_METRICS = {"kept_log", "kept_broker", "kept_cluster", "kept_secure_broker"}
"""The distribution, and fixtures of pytest."""
NO_SETTINGS = {"kept.yaml", "kept.security", "kept.command.config", "kept.compacted.before"}
"""A file, a feature, an option of Spark, and a header of a record."""
_FENCED = re.compile(r"^[ ]*```(\w*)\n(.*?)^[ ]*```", re.M | re.S)
_SETTINGS = re.compile(r"^```yaml\n(.*?)^```", re.M | re.S)
_INLINE = re.compile(r"`([^`\n]+)`")
_CALL = re.compile(r"(?:^|[$|;(]\s*|: )kept ((?:-{0,2}[a-z])[^|;&<>)#`$]*)")


def inline(page: Path) -> Iterator[str]:
    """What a page has between backticks, outside of its blocks."""
    yield from _INLINE.findall(_FENCED.sub("", page.read_text(encoding="utf-8")))


def calls(page: Path) -> Iterator[str]:
    """The words after ``kept`` of each command that a page shows or names."""
    for language, text in _FENCED.findall(page.read_text(encoding="utf-8")):
        for line in text.replace("\\\n", " ").splitlines():
            typed = line.strip().startswith("$ ") or language == "yaml" or line.startswith("kept ")
            yield from _CALL.findall(line.strip()) if typed else ()
    for code in inline(page):
        yield from _CALL.findall(code)


def wrong_in(words: str) -> str | None:
    """The first word of a command that is neither a command nor an option; None: all are."""
    command: click.Command = kept
    options: dict[str, bool] = {}
    pending = iter(words.split())
    for word in pending:
        parameters = command.get_params(click.Context(command))
        for parameter in parameters:
            if isinstance(parameter, click.Option):
                names = [*parameter.opts, *parameter.secondary_opts]
                options |= dict.fromkeys(names, parameter.is_flag)
        if word.startswith("-") and word.strip("-"):
            name, equals, _ = word.partition("=")
            if re.match(r"--?[a-z]", name):
                if name not in options:
                    return name
                if not options[name] and not equals:
                    next(pending, None)
        elif isinstance(command, click.Group):
            if re.fullmatch(r"[A-Z]+|…|[a-z]+…", word):
                return None  # a placeholder
            below = command.get_command(click.Context(command), word)
            if below is None:
                return word
            command = below
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_are_there(page):
    wrong = {words: name for words in calls(page) if (name := wrong_in(words)) is not None}
    assert not wrong


def helped(command: click.Command, context: click.Context) -> Iterator[click.Command]:
    """A command and all below it."""
    yield command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from helped(below, click.Context(below, parent=context, info_name=name))


def test_examples_of_help_are_there():
    """They are the command blocks of the page of all commands."""
    shown = [
        words
        for command in helped(kept, click.Context(kept, info_name="kept"))
        for line in (command.epilog or "").replace(" \\\n", " ").splitlines()
        for words in _CALL.findall(f"$ {line.strip()}")
    ]
    assert len(shown) > 80
    assert not {words: name for words in shown if (name := wrong_in(words)) is not None}


def test_the_check_of_commands_can_fail():
    assert wrong_in("topic create users --partitions 3 --config cleanup.policy=compact") is None
    assert wrong_in("spark --master local[2] table users --limit 3") is None
    assert wrong_in("topic create users --partition 3") == "--partition"
    assert wrong_in("topic craete users") == "craete"
    shown = list(calls(ROOT / "docs" / "command-line.md"))
    assert "group reset-offsets billing --all-topics --shift-by -1 --dry-run" in shown
    assert any(words.startswith("consume orders --table --json") for words in shown)


def test_settings_and_metrics_are_there():
    missing = []
    for page in PAGES:
        for code in inline(page):
            where = f"{page.relative_to(ROOT)}: {code}"
            setting = re.match(r"(kept(?:\.[a-z][a-z0-9]*)+)(?:=|$)", code)
            if setting is not None and not _is_named(setting[1]):
                missing.append(where)
            metric = re.match(r"kept_[a-z0-9_]+", code)
            if metric is not None and metric[0] not in METRICS | NO_METRICS:
                missing.append(where)
    assert not missing, missing
    assert "kept_throttled_seconds_total" in METRICS, "a row's name is without _total"


def _is_named(name: str) -> bool:
    """Whether a name is that of a setting, or of a module of ours."""
    if name in BROKER_SETTINGS or name in TOPIC_SETTINGS or name in NO_SETTINGS:
        return True
    inner = name.removeprefix("kept.").replace(".", "/")
    places = (ROOT / inner, ROOT / f"{inner}.py", ROOT / "kept" / inner, ROOT / f"kept/{inner}.py")
    return any(place.exists() for place in places)


def settings_blocks() -> Iterator[tuple[str, str]]:
    """(page and line, text) of the blocks that are a node's kept.yaml."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in _SETTINGS.finditer(text):
            if re.match(r"[a-z]+(\.[a-z]+)*: ", found[1]):
                line = text.count("\n", 0, found.start()) + 1
                yield f"{page.relative_to(ROOT)}:{line}", found[1]


def test_files_of_settings_are_ones_that_a_node_takes(tmp_path):
    found = dict(settings_blocks())
    assert len(found) >= 5
    for number, text in enumerate(found.values()):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        NodeConfig.load(str(file), {}, {})
    file.write_text(text.replace("listeners", "listners"))
    with pytest.raises(ConfigurationError, match="did you mean"):
        NodeConfig.load(str(file), {}, {})
