"""Tab completion in bash, zsh and fish: what a shell runs, and the types of arguments that complete
from the cluster.

A shell's script sets ``COMP_LINE`` to the command line up to the cursor and ``_KEPT_COMPLETE`` to
``SHELL_complete``, runs ``kept`` and reads one candidate a line: kind, value and help, separated by
tabs. The kinds are ``plain``, ``nospace`` (more of the word is to follow), ``file`` and ``dir``.
Nothing that fails is told: a cluster that does not answer within a second has no names to offer.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import click
from click.shell_completion import (
    CompletionItem,
    ShellComplete,
    add_completion_class,
    shell_complete,
    split_arg_string,
)

from kept.cli.context_file import cluster_of, path_of, read_contexts
from kept.cli.shell import COMPLETE_VARIABLE, WholeNumber, did_you_mean

if TYPE_CHECKING:
    from kept.client.client import Client
    from kept.node.config.config_def import ConfigDef, Settings

_Name = TypeVar("_Name")
_Function = TypeVar("_Function", bound=Callable[..., Any])
DEADLINE_S: Final = 1.0
"""So long a cluster may take to answer; whoever pressed the key waits for it."""

_HELP_COLUMNS: Final = 160
"""As much of a candidate's help goes to the shell, which shows what fits a line."""

_BASH: Final = r"""%(complete_func)s() {
    local kind value help
    COMPREPLY=()
    while IFS=$'\t' read -r kind value help; do
        case $kind in
            file) compopt -o default ;;
            dir) compopt -o dirnames ;;
            nospace) compopt -o nospace; COMPREPLY+=("$value") ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done < <(COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \
        %(complete_var)s=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

_ZSH: Final = r"""#compdef %(prog_name)s
%(complete_func)s() {
    local kind value help
    local -a described bare
    while IFS=$'\t' read -r kind value help; do
        case $kind in
            file) _files ;;
            dir) _files -/ ;;
            nospace) compadd -S '' -- "$value" ;;
            plain)
                if [[ -n $help ]]; then
                    described+=("${value//:/\\:}:$help")
                else
                    bare+=("$value")
                fi ;;
        esac
    done < <(COMP_LINE="${(j: :)words[1,CURRENT-1]} $PREFIX" \
        %(complete_var)s=zsh_complete ${words[1]} 2>/dev/null)
    (( $#described )) && _describe -V %(prog_name)s described
    (( $#bare )) && compadd -a bare
    return 0
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""

_FISH: Final = r"""function %(complete_func)s
    for row in (env COMP_LINE=(commandline -cp | string collect) \
            %(complete_var)s=fish_complete %(prog_name)s 2>/dev/null)
        set -l field (string split -m 2 \t -- $row)
        switch $field[1]
            case file
                __fish_complete_path $field[2]
            case dir
                __fish_complete_directories $field[2]
            case plain nospace
                printf '%%s\t%%s\n' $field[2] "$field[3]"
        end
    end
end
complete -c %(prog_name)s -f -a '(%(complete_func)s)'
"""


class _Completer(ShellComplete):
    """click's completion with the protocol that this module describes."""

    prefix = ""
    """What stands before a candidate in the word under the cursor, such as ``--acks=``."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Words before the one under the cursor, without the program's, and that word so far."""
        # With a letter more the last word is the one under the cursor, be it empty or quoted.
        *words, last = split_arg_string(f"{os.environ.get('COMP_LINE', '')}x")
        incomplete = last.removesuffix("x")
        if option := re.match(r"--[^=]+=", incomplete):
            self.prefix = option[0]
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem[str]) -> str:
        """One line of the answer."""
        kind = "nospace" if item.nospace else item.type
        value = item.value if kind in ("file", "dir") else self.replacement(item.value)
        about = " ".join((item.help or "").split())
        return f"{kind}\t{value}\t{about[:_HELP_COLUMNS]}"

    def replacement(self, value: str) -> str:
        """What the shell puts in place of the word under the cursor."""
        return self.prefix + value


class _Bash(_Completer):
    """bash ends words at ``=`` and ``:``, and replaces what stands behind the last of them."""

    name: ClassVar[str] = "bash"
    source_template: ClassVar[str] = _BASH

    def replacement(self, value: str) -> str:
        """The part of ``value`` behind what bash takes for words of their own."""
        line = os.environ.get("COMP_LINE", "")
        word = re.split(r"\s", line)[-1].removeprefix(self.prefix)
        quoted = word.startswith(("'", '"'))
        breaks = os.environ.get("COMP_WORDBREAKS", ":=")
        typed = "" if quoted else word[: 1 + max(word.rfind(c) for c in breaks)] if breaks else ""
        return value.removeprefix(typed)


class _Zsh(_Completer):
    name: ClassVar[str] = "zsh"
    source_template: ClassVar[str] = _ZSH


class _Fish(_Completer):
    name: ClassVar[str] = "fish"
    source_template: ClassVar[str] = _FISH


SHELLS: Final[dict[str, type[_Completer]]] = {c.name: c for c in (_Bash, _Zsh, _Fish)}


def complete(root: click.Command, instruction: str) -> int:
    """Do what ``_KEPT_COMPLETE`` says: ``SHELL_source`` or ``SHELL_complete``. The exit status."""
    for completer in SHELLS.values():
        add_completion_class(completer)
    try:
        return shell_complete(root, {}, "kept", COMPLETE_VARIABLE, instruction)
    except Exception:
        if os.environ.get("KEPT_TRACEBACK"):
            raise
        return 1


class _Late(BaseException):
    """The deadline is over. No Exception, so that nothing on the way takes it for its own."""


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    """Leave the block after ``DEADLINE_S``, whatever it waits for."""

    def over(_number: int, _frame: Any) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def names_of_cluster(ctx: click.Context, names: Callable[[Client], list[_Name]]) -> list[_Name]:
    """What ``names`` finds out from the cluster that the command would go to; nothing if that
    takes longer than ``DEADLINE_S``. Raises KeptError and OSError, as commands do.
    """
    given = ctx.params
    try:
        with _deadline():
            from kept.client.client import Client

            target = cluster_of(
                given.get("bootstrap"), given.get("context"), given.get("command_config")
            )
            with Client(
                target.servers,
                client_id="kept-completion",
                timeout_ms=round(1000 * DEADLINE_S),
                security=target.security,
            ) as client:
                return names(client)
    except _Late:
        return []


def _items(names: list[str], incomplete: str) -> list[CompletionItem[str]]:
    """Those that begin so; names that begin with ``__`` are Kafka's own, and only for who typed
    that much.
    """
    hidden = "" if incomplete.startswith("_") else "__"
    return [
        CompletionItem(name)
        for name in sorted(names)
        if name.startswith(incomplete) and not (hidden and name.startswith(hidden))
    ]


def given_values(ctx: click.Context, param: click.Parameter) -> Sequence[Any]:
    """What an argument of several values has already."""
    given = ctx.params.get(param.name or "")
    return given if isinstance(given, tuple) else ()


class _NameType(click.ParamType):  # type: ignore[type-arg]
    """A name that is taken as it is, and completed."""

    def __init__(self, name: str, names: Callable[[click.Context], list[str]]) -> None:
        self.name = name
        self._names = names

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,
        incomplete: str,
    ) -> list[CompletionItem[str]]:
        """Names that begin with ``incomplete``, without those that the command has already."""
        taken = given_values(ctx, param)
        return _items([name for name in self._names(ctx) if name not in taken], incomplete)


def _topics(ctx: click.Context) -> list[str]:
    return names_of_cluster(ctx, lambda client: list(client.metadata().topics))


def _groups(ctx: click.Context) -> list[str]:
    return names_of_cluster(ctx, lambda client: [g.group for g in client.list_groups([])])


def users_of_cluster(ctx: click.Context) -> list[str]:
    """Those who log in by SCRAM."""
    from kept.client.admin.users import describe_users

    return names_of_cluster(
        ctx, lambda client: sorted({each.user for each in client.run(describe_users())})
    )


def _transactional_ids(ctx: click.Context) -> list[str]:
    from kept.client.admin.transactions import list_transactions

    timeout_ms = round(1000 * DEADLINE_S)
    return names_of_cluster(
        ctx,
        lambda client: [
            each.transactional_id for each in client.run(list_transactions([], timeout_ms))
        ],
    )


def _contexts(_ctx: click.Context) -> list[str]:
    return list(read_contexts(path_of(os.environ)).contexts)


def brokers_of_cluster(ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    """The ids of all brokers that begin so, also of those that are away, with their addresses."""
    from kept.client.admin.cluster import describe_members

    members = names_of_cluster(ctx, lambda client: list(client.run(describe_members())[1]))
    return [
        CompletionItem(str(member.node_id), help=f"{member.host}:{member.port}")
        for member in members
        if str(member.node_id).startswith(incomplete)
    ]


class BrokerId(WholeNumber):
    """The id of a broker, completed from the cluster."""

    name = "broker"

    def __init__(self) -> None:
        super().__init__(0)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Ids that begin with ``incomplete``, without those that the command has already."""
        taken = {str(number) for number in given_values(ctx, param)}
        return [item for item in brokers_of_cluster(ctx, incomplete) if item.value not in taken]


def broker_list(
    ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Completes the last id of ``1,2,3``."""
    return last_of_list(incomplete, lambda last: brokers_of_cluster(ctx, last))


def last_of_list(
    incomplete: str, items: Callable[[str], list[CompletionItem[str]]]
) -> list[CompletionItem[str]]:
    """Completes the last one of ``a,b,c`` by ``items`` that begin so, without those before it."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [
        CompletionItem(f"{before}{comma}{item.value}", help=item.help)
        for item in items(last)
        if item.value not in taken
    ]


def one_of(
    names: Iterable[str],
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]:
    """Completes ``names``, whatever the case of the letters that are typed."""
    known = list(names)

    def complete_name(
        _ctx: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        begin = incomplete.lower()
        return [CompletionItem(name) for name in known if name.lower().startswith(begin)]

    return complete_name


def states_option(known: Sequence[str], text: str) -> Callable[[_Function], _Function]:
    """``--state`` as an argument ``states``: any of ``known`` in any case, spelled as there."""
    by_lower = {state.lower(): state for state in known}

    def check(
        _context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]
    ) -> tuple[str, ...]:
        for state in given:
            if state.lower() not in by_lower:
                near = did_you_mean(state.capitalize(), known)
                raise click.UsageError(
                    f"--state: there is no state {state}{near or ';'} there are {', '.join(known)}"
                )
        return tuple(by_lower[state.lower()] for state in given)

    return click.option(
        "--state",
        "states",
        metavar="STATE",
        multiple=True,
        callback=check,
        shell_complete=one_of(known),
        help=text,
    )


class _SettingType(click.ParamType):  # type: ignore[type-arg]
    """A setting's name or, unless ``name_only``, ``K=V``; taken as it is, and completed."""

    name = "setting"

    def __init__(self, settings: Callable[[], Settings], *, name_only: bool = False) -> None:
        self._settings = settings
        self._name_only = name_only

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem[str]]:
        """Names with what they mean; behind ``=`` the values, where there are few."""
        settings = self._settings()
        name, equals, value = incomplete.partition("=")
        if equals and not self._name_only:
            return [CompletionItem(f"{name}={v}") for v in _values(settings.get(name), value)]
        named = [(s.name, s.doc) for s in settings.values() if not s.refused]
        end = "" if self._name_only else "="
        return [
            CompletionItem(f"{known}{end}", help=doc, nospace=bool(end))
            for known, doc in named
            if known.startswith(incomplete)
        ]


def _values(setting: ConfigDef | None, incomplete: str) -> list[str]:
    """The values of a setting that has few of them."""
    from kept.node.config.config_def import ConfigType

    if setting is None:
        return []
    values = ("true", "false") if setting.kind is ConfigType.BOOLEAN else setting.choices
    return [value for value in values if value.startswith(incomplete)]


def _topic_settings() -> Settings:
    from kept.node.config.definitions import TOPIC_SETTINGS

    return TOPIC_SETTINGS


def _broker_settings() -> Settings:
    from kept.node.config.definitions import HONOURED

    return HONOURED


TOPIC_SETTING: Final = _SettingType(_topic_settings)
TOPIC_SETTING_NAME: Final = _SettingType(_topic_settings, name_only=True)
BROKER_SETTING: Final = _SettingType(_broker_settings)
BROKER_SETTING_NAME: Final = _SettingType(_broker_settings, name_only=True)
TOPIC: Final = _NameType("topic", _topics)
GROUP: Final = _NameType("group", _groups)
CONTEXT: Final = _NameType("context", _contexts)
USER: Final = _NameType("user", users_of_cluster)
TRANSACTIONAL_ID: Final = _NameType("transactional id", _transactional_ids)


def topics_and_partitions(
    ctx: click.Context, param: click.Parameter, incomplete: str, *, whole_topic: bool
) -> list[CompletionItem[str]]:
    """Topics, with a colon to go on from unless a ``whole_topic`` will do; behind the colon the
    topic's partitions.
    """
    topic, colon, _ = incomplete.partition(":")
    if colon:
        partitions = names_of_cluster(
            ctx, lambda client: [f"{topic}:{p}" for p in client.topic(topic).partitions]
        )
        return [CompletionItem(name) for name in partitions if name.startswith(incomplete)]
    taken = given_values(ctx, param)
    free = [name for name in _topics(ctx) if name not in taken and (name, None) not in taken]
    found = _items(free, incomplete)
    if whole_topic:
        return found
    return [CompletionItem(f"{item.value}:", nospace=True) for item in found]


class _PlaceType(click.ParamType):  # type: ignore[type-arg]
    """``TOPIC`` or ``TOPIC:PARTITION`` as text, completed."""

    name = "topic[:partition]"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Topics, and behind a colon the partitions of that topic."""
        return topics_and_partitions(ctx, param, incomplete, whole_topic=True)


PLACE: Final = _PlaceType()
