"""Writes ``docs/configuration.md`` from the typed definitions::

    python -m kept.node.config.reference_page > docs/configuration.md

A test holds the file up to date.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from textwrap import wrap
from typing import Final

from kept.node.config.config_def import ConfigDef
from kept.node.config.definitions import BROKER_SETTINGS, HONOURED, TOPIC_SETTINGS
from kept.node.config.sources import variable
from kept.node.config.unsupported_settings import REFUSED_PREFIXES

WIDTH: Final = 120
"""Characters of a line."""

_HEAD: Final = """\
# Configuration

Made from the typed definitions by `python -m kept.node.config.reference_page`; do not edit.

A node reads one YAML file (`kept serve --config-file FILE`), then the environment, then `--set`;
the later wins. Names are Apache Kafka's property names, flat (`log.segment.bytes: 1073741824`) or
nested by dots; lists are YAML lists or comma-separated text. The environment variable of a setting
is `KEPT_` and its name in upper case with `_` for `.`, a leading `kept.` dropped:
`log.segment.bytes` is `{segment}`, `kept.log.format` is `{format}`. Variables that
Kubernetes injects for services named kept… are ignored. An unknown name, a value out of range and
settings that contradict each other are refused, by name and with the nearest valid one;
`kept serve --check` only checks.

Without any setting a node is a cluster of one: it binds 127.0.0.1 (and ::1 where there is IPv6) on
port 9092, advertises `localhost`, and keeps its data in `./data`. `--port P` means
`listeners=PLAINTEXT://localhost:P`; `--data-dir D` means `log.dirs=D/log` and
`metadata.log.dir=D/meta`; each is refused beside the settings that it stands for. Nothing is
authenticated or encrypted, so anything beyond this machine must be said explicitly.

Some variables are no settings. `KEPT_BOOTSTRAP` is where the command line looks for a cluster,
`KEPT_CONTEXT` a cluster by its name, `KEPT_COMMAND_CONFIG` the file that says how to connect. With
`KEPT_TRACEBACK=1` a command that fails shows where. `KEPT_KERNEL=python` takes plain Python in
place of those compiled kernels that have such a form. `KEPT_FAIL_POINT` is for tests.

*Read-only* settings change with a restart, the others also while
the node runs (AlterConfigs on a broker).
"""

_TOPICS: Final = """\
## Topics

Set with CreateTopics and AlterConfigs (`kept topic create --config`, `kept topic alter --config`),
and in force at once. *Default from* names the broker setting that gives topics their default.
All of Apache Kafka 4.3's public topic settings are there; those that begin with `kept.` are ours.
`segment.bytes` is accepted from 1024, where Kafka wants 1 MiB.
"""

_ACCEPTED: Final = """\
## Accepted without effect

Kafka's settings that change nothing here, with the reason. They are accepted so that a
`server.properties` can be taken over, checked for their type and range, and described.
"""

_REFUSED: Final = """\
## Refused

Settings that would be dangerous to ignore. The first ones may be given with their default only.
"""


def document() -> str:
    """The whole text of ``docs/configuration.md``."""
    head = _HEAD.format(segment=variable("log.segment.bytes"), format=variable("kept.log.format"))
    accepted = [s for s in BROKER_SETTINGS.values() if s.no_effect and s.name not in HONOURED]
    refused = [s for s in BROKER_SETTINGS.values() if s.refused]
    return "\n".join(
        (
            head,
            "## Nodes\n",
            *_nodes(),
            _TOPICS,
            *_topics(),
            _ACCEPTED,
            *_by_reason(accepted),
            "",
            _REFUSED,
            *_list(f"`{setting.name}`: {setting.refused}." for setting in refused),
            *_list(f"`{prefix}*`: {why}." for prefix, why in REFUSED_PREFIXES.items()),
            "",
        )
    )


def _nodes() -> Iterable[str]:
    for setting in HONOURED.values():
        yield from _section(setting, "while the node runs" if setting.dynamic else "read-only")


def _topics() -> Iterable[str]:
    for name in sorted(TOPIC_SETTINGS, key=lambda name: (name.startswith("kept."), name)):
        setting = TOPIC_SETTINGS[name]
        synonyms = ", ".join(f"`{synonym.name}`" for synonym in setting.synonyms)
        yield from _section(setting, f"default from {synonyms}" if synonyms else "")


def _section(setting: ConfigDef, update: str) -> Iterable[str]:
    default = {None: "unset", "": "empty"}.get(setting.default, f"`{setting.default}`")
    facts = (setting.kind.name.lower(), f"default {default}", setting.allowed, update)
    yield f"### {setting.name}"
    yield ""
    yield from _wrapped(f"*{', '.join(fact for fact in facts if fact)}.*")
    yield ""
    yield from _wrapped(_meaning(setting))
    yield ""


def _wrapped(text: str) -> Iterable[str]:
    return wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _meaning(setting: ConfigDef) -> str:
    text = setting.doc
    if setting.no_effect:
        text += f" *Accepted, no effect: {setting.no_effect}*"
    if setting.refused:
        text += f" *Only the default is accepted: {setting.refused}*"
    return text


def _by_reason(settings: Iterable[ConfigDef]) -> Iterable[str]:
    reasons: dict[str, list[str]] = {}
    for setting in settings:
        reasons.setdefault(setting.no_effect, []).append(f"`{setting.name}`")
    sentences: Mapping[str, list[str]] = reasons
    for why, names in sentences.items():
        yield from _list([f"{why[0].upper()}{why[1:]} {', '.join(names)}"])


def _list(items: Iterable[str]) -> Iterable[str]:
    for item in items:
        yield from wrap(
            f"- {item}",
            WIDTH,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )


if __name__ == "__main__":
    print(document(), end="")
