"""``kept acl``: who may do what, on kept or on Apache Kafka."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from ipaddress import ip_address
from typing import Final

import click
from click.shell_completion import CompletionItem

from kept.cli.bootstrap_option import bootstrap_option
from kept.cli.completion import (
    GROUP,
    TOPIC,
    TRANSACTIONAL_ID,
    last_of_list,
    one_of,
    users_of_cluster,
)
from kept.cli.output import echo, show_json, show_table
from kept.cli.shell import Failure, Group, examples, json_option
from kept.cli.unavailable import open_client
from kept.client.admin import acls
from kept.client.admin.acls import MATCH, Acl
from kept.client.bootstrap import Bootstrap
from kept.client.client import Client
from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import (
    CLUSTER_NAME,
    WILDCARD,
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.storage.errors import SecurityDisabled

_INTERNAL: Final = ("__consumer_offsets", "__transaction_state")
"""Topics that hold what everybody commits: who reads them reads all of it."""
_PRODUCER: Final = (AclOperation.WRITE, AclOperation.DESCRIBE, AclOperation.CREATE)
_CONSUMER: Final = (AclOperation.READ, AclOperation.DESCRIBE)
_TRANSACTIONS: Final = (AclOperation.WRITE, AclOperation.DESCRIBE)


def _spelled(member: IntEnum) -> str:
    return member.name.lower().replace("_", "-")


_OPERATIONS: Final = {_spelled(each): each for each in AclOperation if each > AclOperation.ANY}
_TYPES: Final = {_spelled(each): each for each in AclResourceType if each > AclResourceType.ANY}


_USER: Final = "User:"
_NAMES_OF: Final = {
    "topic": TOPIC,
    "group": GROUP,
    "transactional-id": TRANSACTIONAL_ID,
}


class Principal(click.ParamType):  # type: ignore[type-arg]
    """``User:ada``."""

    name = "principal"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The principal; a usage error for one without a type."""
        if not all(value.partition(":")):
            self.fail(f"{value!r} has no type: write User:{value.strip(':')}", param, ctx)
        return value

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem[str]]:
        """Users who log in by SCRAM, as ``User:NAME``."""
        names = [f"{_USER}{name}" for name in users_of_cluster(ctx)]
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class Host(click.ParamType):  # type: ignore[type-arg]
    """An address, or ``*``."""

    name = "host"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The host; a usage error for a name, which would match nobody."""
        if value != WILDCARD:
            try:
                ip_address(value)
            except ValueError:
                self.fail(f"{value!r} is no address: names are not resolved", param, ctx)
        return value


class Operations(click.ParamType):  # type: ignore[type-arg]
    """``read,write``."""

    name = "operations"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[AclOperation, ...]:
        """The operations; a usage error for one that is not known."""
        unknown = [name for name in value.split(",") if name not in _OPERATIONS]
        if unknown:
            known = ", ".join(_OPERATIONS)
            self.fail(f"{unknown[0]!r} is no operation: {known}", param, ctx)
        return tuple(_OPERATIONS[name] for name in value.split(","))

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,
        incomplete: str,
    ) -> list[CompletionItem[str]]:
        """The last of the operations."""
        names = one_of(_OPERATIONS)
        return last_of_list(incomplete, lambda last: names(ctx, param, last))


class Resource(click.ParamType):  # type: ignore[type-arg]
    """``topic:orders``, ``cluster``."""

    name = "resource"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[AclResourceType, str]:
        """Type and name; a usage error for an unknown type, or one without a name."""
        kind, _, name = value.partition(":")
        if kind not in _TYPES:
            self.fail(f"{kind!r} is no type of resource: {', '.join(_TYPES)}", param, ctx)
        if kind == "cluster":
            name = name or CLUSTER_NAME
        if not name:
            self.fail(f"which {kind}? Write {kind}:NAME, or {kind}:* for all", param, ctx)
        return _TYPES[kind], name

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Types of resources; behind the colon topics, groups and transactional ids."""
        kind, colon, begin = incomplete.partition(":")
        if not colon:
            return [
                CompletionItem(name if name == "cluster" else f"{name}:", nospace=name != "cluster")
                for name in _TYPES
                if name.startswith(kind)
            ]
        names = _NAMES_OF.get(kind)
        found = [] if names is None else names.shell_complete(ctx, param, begin)
        return [CompletionItem(f"{kind}:{item.value}") for item in found]


_host = click.option(
    "--host", type=Host(), default=WILDCARD, show_default=True, help="Only from this address."
)
_prefix = click.option(
    "--prefix", is_flag=True, help="The name stands for all names that begin so."
)


@contextmanager
def _acl_client(bootstrap: Bootstrap) -> Iterator[Client]:
    """A client; that the cluster has no authorizer is said with what turns one on."""
    try:
        with open_client(bootstrap) as client:
            yield client
    except SecurityDisabled as error:
        raise Failure(
            "this cluster has no ACLs, since no broker asks them: set authorizer.class.name "
            f"({error})"
        ) from error


@click.group(cls=Group, epilog=examples("kept acl add User:ada read topic:orders"))
def acl() -> None:
    """Say who may do what: add, list, delete and check ACLs."""


@acl.command(
    epilog=examples(
        "kept acl add User:ada read,describe-configs topic:orders",
        "kept acl add User:ada --producer --topic orders",
        "kept acl add User:bob --consumer --topic orders --group reports",
        "kept acl add User:eve all topic:secret. --prefix --deny",
    )
)
@click.argument("principal", type=Principal())
@click.argument("operations", type=Operations(), required=False)
@click.argument("resource", type=Resource(), required=False)
@click.option("--producer", is_flag=True, help="Allow what a producer of --topic needs.")
@click.option("--consumer", is_flag=True, help="Allow what a consumer of --topic in --group needs.")
@click.option("--topic", type=TOPIC, help="The topic of --producer or --consumer.")
@click.option("--group", "group_id", type=GROUP, help="The group of --consumer.")
@click.option(
    "--transactional-id",
    type=TRANSACTIONAL_ID,
    metavar="ID",
    help="With --producer: also allow transactions of this id.",
)
@_prefix
@_host
@click.option("--deny", is_flag=True, help="Forbid it, whatever else allows it.")
@bootstrap_option
def add(
    *,
    principal: str,
    operations: tuple[AclOperation, ...] | None,
    resource: tuple[AclResourceType, str] | None,
    producer: bool,
    consumer: bool,
    topic: str | None,
    group_id: str | None,
    transactional_id: str | None,
    prefix: bool,
    host: str,
    deny: bool,
    bootstrap: Bootstrap,
) -> None:
    """Allow PRINCIPAL the OPERATIONS on RESOURCE, or forbid them.

    PRINCIPAL is User:NAME, and User:* everybody. OPERATIONS are separated by commas, such as
    read,write. RESOURCE is topic:NAME, group:NAME, transactional-id:NAME or cluster.
    """
    wanted: list[tuple[AclResourceType, str, Iterable[AclOperation]]] = []
    if operations is not None and resource is not None:
        wanted.append((*resource, operations))
    elif operations is not None or not (producer or consumer):
        raise click.UsageError("give OPERATIONS and RESOURCE, or --producer or --consumer")
    if (producer or consumer) and topic is None:
        raise click.UsageError("--producer and --consumer need --topic")
    if topic is not None and not (producer or consumer):
        raise click.UsageError("--topic is of --producer and --consumer; else RESOURCE names it")
    if group_id is not None and not consumer:
        raise click.UsageError("--group is of --consumer; else RESOURCE names it")
    if transactional_id is not None and not producer:
        raise click.UsageError("--transactional-id is of --producer; else RESOURCE names it")
    if producer and topic is not None:
        wanted.append((AclResourceType.TOPIC, topic, _PRODUCER))
        if transactional_id is not None:
            wanted.append((AclResourceType.TRANSACTIONAL_ID, transactional_id, _TRANSACTIONS))
    if consumer and topic is not None:
        if group_id is None:
            raise click.UsageError("--consumer needs --group")
        _refuse_internal(topic, prefix)
        wanted.append((AclResourceType.TOPIC, topic, _CONSUMER))
        wanted.append((AclResourceType.GROUP, group_id, (AclOperation.READ,)))
    created = [
        Acl(
            int(kind),
            name,
            int(_pattern(kind, prefix)),
            principal,
            host,
            int(operation),
            int(AclPermission.DENY if deny else AclPermission.ALLOW),
        )
        for kind, name, each in wanted
        for operation in each
    ]
    with _acl_client(bootstrap) as client:
        client.run(acls.create_acls(created))
    for each in created:
        echo(f"added: {_sentence(each)}")


def _pattern(kind: AclResourceType, prefix: bool) -> PatternType:
    if prefix and kind is not AclResourceType.CLUSTER:
        return PatternType.PREFIXED
    return PatternType.LITERAL


def _refuse_internal(topic: str, prefix: bool) -> None:
    covered = [
        name
        for name in _INTERNAL
        if topic in (name, WILDCARD) or (prefix and name.startswith(topic))
    ]
    if covered:
        raise Failure(
            f"--topic {topic} covers {covered[0]}, and who reads that reads what all groups "
            "commit: name the topics, or a prefix of them. (kept acl add PRINCIPAL read topic:* "
            "allows it knowingly.)"
        )


@acl.command("list", epilog=examples("kept acl list --resource topic:orders --json"))
@click.option("--principal", type=Principal(), help="Only ACLs of this principal.")
@click.option("--resource", type=Resource(), help="Only ACLs that decide about this resource.")
@json_option
@bootstrap_option
def list_acls(
    *,
    principal: str | None,
    resource: tuple[AclResourceType, str] | None,
    as_json: bool,
    bootstrap: Bootstrap,
) -> None:
    """List ACLs."""
    wanted = Acl(principal=principal)
    if resource is not None:
        wanted = replace(wanted, resource_type=int(resource[0]), name=resource[1], pattern=MATCH)
    with _acl_client(bootstrap) as client:
        found = client.run(acls.describe_acls(wanted))
    rows = [_row(each) for each in sorted(map(_binding, found))]
    if as_json:
        show_json(rows)
    else:
        columns = ("permission", "principal", "operation", "resource", "pattern", "host")
        empty = "there are no such ACLs: kept acl add User:NAME read topic:NAME adds one"
        show_table(columns, [[row[column] for column in columns] for row in rows], empty=empty)


@acl.command(
    epilog=examples("kept acl delete User:ada read topic:orders", "kept acl delete User:ada --all")
)
@click.argument("principal", type=Principal())
@click.argument("operations", type=Operations(), required=False)
@click.argument("resource", type=Resource(), required=False)
@click.option("--all", "every", is_flag=True, help="All that PRINCIPAL has, allowed and denied.")
@_prefix
@_host
@click.option("--deny", is_flag=True, help="Those that forbid it.")
@bootstrap_option
def delete(
    *,
    principal: str,
    operations: tuple[AclOperation, ...] | None,
    resource: tuple[AclResourceType, str] | None,
    every: bool,
    prefix: bool,
    host: str,
    deny: bool,
    bootstrap: Bootstrap,
) -> None:
    """Delete ACLs: give the same words as to kept acl add, or --all."""
    if every == (resource is not None):
        raise click.UsageError("give OPERATIONS and RESOURCE, or --all")
    if every and (prefix or deny or host != WILDCARD):
        raise click.UsageError("--all deletes every ACL of PRINCIPAL: no --prefix, --host, --deny")
    filters = [Acl(principal=principal)]
    if operations is not None and resource is not None:
        kind, name = resource
        permission = AclPermission.DENY if deny else AclPermission.ALLOW
        filters = [
            Acl(
                *(int(kind), name, int(_pattern(kind, prefix)), principal, host),
                *(int(operation), int(permission)),
            )
            for operation in operations
        ]
    with _acl_client(bootstrap) as client:
        deleted = client.run(acls.delete_acls(filters))
    if not deleted:
        raise Failure(f"there is no such ACL of {principal}: kept acl list shows those there are")
    for each in deleted:
        echo(f"deleted: {_sentence(each)}")


@acl.command(epilog=examples("kept acl check User:ada read topic:orders --host 10.1.2.3"))
@click.argument("principal", type=Principal())
@click.argument("operations", type=Operations())
@click.argument("resource", type=Resource())
@click.option("--host", type=Host(), default="127.0.0.1", show_default=True, help="Of the client.")
@json_option
@bootstrap_option
def check(
    *,
    principal: str,
    operations: tuple[AclOperation, ...],
    resource: tuple[AclResourceType, str],
    host: str,
    as_json: bool,
    bootstrap: Bootstrap,
) -> None:
    """Say whether PRINCIPAL may do the OPERATIONS on RESOURCE, and which ACL decides.

    The exit status is 1 if one of them is denied. The command needs Describe on the cluster, and
    DescribeConfigs to know super users.
    """
    kind, name = resource
    with _acl_client(bootstrap) as client:
        found = client.run(acls.describe_acls(Acl(int(kind), name, MATCH)))
        settings = _settings(client)
    index = AclIndex().with_changes(map(_binding, found))
    rows = []
    for operation in operations:
        allowed, why, binding = _decide(index, settings, (principal, host, operation, kind, name))
        rows.append(
            {
                "operation": _spelled(operation),
                "allowed": allowed,
                "why": why,
                "binding": None if binding is None else _row(binding),
            }
        )
    if as_json:
        show_json(rows)
    else:
        for row in rows:
            echo(f"{row['operation']}: {'allowed' if row['allowed'] else 'denied'}: {row['why']}")
    denied = [str(row["operation"]) for row in rows if not row["allowed"]]
    if denied:
        raise Failure(f"{principal} may not {', '.join(denied)} {_named(kind, name)} from {host}")


def _decide(
    index: AclIndex,
    settings: dict[str, str | None],
    asked: tuple[str, str, AclOperation, AclResourceType, str],
) -> tuple[bool, str, AclBinding | None]:
    """Whether it is allowed, why, and by which binding."""
    supers = [each.strip() for each in (settings.get("super.users") or "").split(";")]
    if asked[0] in supers:
        return True, f"{asked[0]} is one of super.users", None
    decision = index.decide(*asked)
    if decision.binding is not None:
        return bool(decision.allowed), _sentence(decision.binding), decision.binding
    if decision.allowed is None:
        is_open = settings.get("allow.everyone.if.no.acl.found") == "true"
        value = "true" if is_open else "false"
        return is_open, f"no ACL names it (allow.everyone.if.no.acl.found={value})", None
    return False, "ACLs name it, but none allows this", None


def _settings(client: Client) -> dict[str, str | None]:
    node = min(client.view.nodes or client.metadata([]).nodes)
    return {entry.name: entry.value for entry in client.broker_configs(str(node))}


def _binding(acl: Acl) -> AclBinding:
    return AclBinding(
        AclResourceType(acl.resource_type),
        acl.name or "",
        PatternType(acl.pattern),
        acl.principal or "",
        acl.host or "",
        AclOperation(acl.operation),
        AclPermission(acl.permission),
    )


def _row(binding: AclBinding) -> dict[str, str]:
    return {
        "permission": _spelled(binding.permission),
        "principal": binding.principal,
        "operation": _spelled(binding.operation),
        "resource": _named(binding.resource_type, binding.name),
        "pattern": _spelled(binding.pattern),
        "host": binding.host,
    }


def _named(kind: AclResourceType, name: str) -> str:
    return "cluster" if kind is AclResourceType.CLUSTER else f"{_spelled(kind)}:{name}"


def _sentence(acl: Acl | AclBinding) -> str:
    """``allow User:ada read topic:orders (prefix) from 10.0.0.1``."""
    row = _row(_binding(acl) if isinstance(acl, Acl) else acl)
    prefix = " (prefix)" if row["pattern"] == "prefixed" else ""
    host = "" if row["host"] == WILDCARD else f" from {row['host']}"
    words: Sequence[str] = (row["permission"], row["principal"], row["operation"], row["resource"])
    return f"{' '.join(words)}{prefix}{host}"
