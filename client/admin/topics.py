"""Topics and settings: operations without I/O.

An operation is a generator that yields lists of calls, is sent their responses, and returns its
result; a shell drives it (:meth:`kept.client.client.Client.run`) and throws in any error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from kept.client.core.broker_errors import failure
from kept.client.core.calls import Anywhere, Call, Route, ToController, ToNode
from kept.client.core.metadata import ClusterMetadata, TopicMetadata
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import KeptError, NotLeaderOrFollower

_T = TypeVar("_T")
Operation = Generator[list[Call], list[Any], _T]
"""Yields calls, is sent responses, returns a result."""


TOPIC: Final = 2
BROKER: Final = 4
_SET: Final = 0
_DELETE: Final = 1
SOURCES: Final = {
    0: "unknown",
    1: "topic",
    2: "broker (dynamic)",
    3: "cluster default (dynamic)",
    4: "broker file",
    5: "default",
    6: "logger",
    7: "client metrics",
    8: "group",
}


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to be created; -1 means the broker's default."""

    name: str
    partitions: int = -1
    replication_factor: int = -1
    config: Mapping[str, str] = field(default_factory=dict)


class ConfigEntry(NamedTuple):
    """One setting as DescribeConfigs tells it."""

    name: str
    value: str | None
    source: str
    read_only: bool
    sensitive: bool
    documentation: str | None


def first_error(
    results: Iterable[Any], what: Callable[[Any], str], *, key: str = ""
) -> KeptError | None:
    """The first error among results that carry an error code and perhaps a message; ``key``: the
    group that was asked for.
    """
    for result in results:
        message = getattr(result, "error_message", None)
        error = failure(int(result.error_code), what(result), message, key=key)
        if error is not None:
            return error
    return None


def metadata(
    view: ClusterMetadata, topics: Sequence[str] | None, create: bool, timeout_ms: int
) -> Operation[ClusterMetadata]:
    """Refresh ``view``: these topics, or all of them."""
    call = metadata_call(topics, create)
    call.timeout_ms = timeout_ms
    (response,) = yield [call]
    view.update(response, None if topics is None else tuple(topics))
    return view


def metadata_call(topics: Sequence[str] | None, create: bool = False) -> Call:
    """A Metadata request: for all topics when None."""

    def values(version: int) -> Mapping[str, Any]:
        every = None if version >= 1 else ()
        wanted = every if topics is None else [{"name": n, "topic_id": None} for n in topics]
        return {"topics": wanted, "allow_auto_topic_creation": create}

    return Call(ApiKey.METADATA, values, what="Metadata")


def create_topics(
    view: ClusterMetadata, topics: Sequence[NewTopic], timeout_ms: int, validate_only: bool
) -> Operation[None]:
    """Create topics and wait until every partition has a leader."""
    yield [create_topics_call(topics, timeout_ms, validate_only)]
    if not validate_only:
        wanted = {t.name: t.partitions for t in topics}
        (response,) = yield [await_topics(wanted, timeout_ms)]
        view.update(response, tuple(wanted))


def create_topics_call(topics: Sequence[NewTopic], timeout_ms: int, validate_only: bool) -> Call:
    """A CreateTopics request; done when the controller has created them."""
    values = {
        "topics": [
            {
                "name": t.name,
                "num_partitions": t.partitions,
                "replication_factor": t.replication_factor,
                "assignments": (),
                "configs": [{"name": k, "value": v} for k, v in t.config.items()],
            }
            for t in topics
        ],
        "timeout": timeout_ms,
        "validate_only": validate_only,
    }
    return Call(
        ApiKey.CREATE_TOPICS,
        values,
        ToController(),
        what=f"CreateTopics of {', '.join(t.name for t in topics)}",
        timeout_ms=timeout_ms,
        check=lambda r: first_error(r.topics, lambda t: f"CreateTopics of {t.name}"),
        repeatable=False,
    )


def await_topics(wanted: Mapping[str, int], timeout_ms: int) -> Call:
    """Metadata, again and again until every topic has its partitions and they have leaders."""

    def check(response: Any) -> KeptError | None:
        for topic in response.topics:
            code = int(topic.error_code)
            missing = code in (0, 3, 5) and (
                len(topic.partitions) < max(1, wanted.get(str(topic.name), 1))
                or any(int(p.leader_id) < 0 for p in topic.partitions)
            )
            if missing:
                return NotLeaderOrFollower(f"{topic.name} has no leaders yet")
            error = failure(code, f"Metadata of {topic.name}")
            if error is not None:
                return error
        return None

    call = metadata_call(tuple(wanted))
    call.timeout_ms, call.check = timeout_ms, check
    return call


def delete_topics(names: Sequence[str], timeout_ms: int) -> Operation[None]:
    """Delete topics."""
    values = {
        "topics": [{"name": n, "topic_id": None} for n in names],
        "topic_names": tuple(names),
        "timeout": timeout_ms,
    }
    yield [
        Call(
            ApiKey.DELETE_TOPICS,
            values,
            ToController(),
            what=f"DeleteTopics of {', '.join(names)}",
            timeout_ms=timeout_ms,
            check=lambda r: first_error(r.responses, lambda t: f"DeleteTopics of {t.name}"),
            repeatable=False,
        )
    ]


def create_partitions(
    view: ClusterMetadata, name: str, count: int, timeout_ms: int
) -> Operation[None]:
    """Raise a topic's number of partitions to ``count``, and wait until all have a leader."""
    yield [create_partitions_call(name, count, timeout_ms)]
    (response,) = yield [await_topics({name: count}, timeout_ms)]
    view.update(response, (name,))


def create_partitions_call(name: str, count: int, timeout_ms: int) -> Call:
    """A CreatePartitions request; done when the controller has created them."""
    values = {
        "topics": [{"name": name, "count": count, "assignments": None}],
        "timeout": timeout_ms,
        "validate_only": False,
    }
    what = f"CreatePartitions of {name}"
    return Call(
        ApiKey.CREATE_PARTITIONS,
        values,
        ToController(),
        what=what,
        timeout_ms=timeout_ms,
        check=lambda r: first_error(r.results, lambda _: what),
        repeatable=False,
    )


def alter_configs(
    kind: int,
    name: str,
    set_: Mapping[str, str],
    delete: Sequence[str],
    timeout_ms: int,
    *,
    validate_only: bool = False,
    route: Route | None = None,
) -> Operation[None]:
    """Set and delete single settings of a topic or a broker, or see whether they would be. The
    request goes to ``route``, else to the broker that it is about, or to any node.
    """
    changes: list[Mapping[str, Any]] = [
        {"name": k, "config_operation": _SET, "value": v} for k, v in set_.items()
    ]
    changes += [{"name": k, "config_operation": _DELETE, "value": None} for k in delete]
    values = {
        "resources": [{"resource_type": kind, "resource_name": name, "configs": changes}],
        "validate_only": validate_only,
    }
    what = f"AlterConfigs of {name or 'all brokers'}"
    yield [
        Call(
            ApiKey.INCREMENTAL_ALTER_CONFIGS,
            values,
            route or _config_route(kind, name),
            what=what,
            timeout_ms=timeout_ms,
            check=lambda r: first_error(r.responses, lambda _: what),
        )
    ]


def describe_configs(
    kind: int, names: Sequence[str], *, documentation: bool = False
) -> Operation[dict[str, list[ConfigEntry]]]:
    """Settings by resource, each in the broker's order."""
    what = f"DescribeConfigs of {', '.join(names) or 'all brokers'}"
    values = {
        "resources": [
            {"resource_type": kind, "resource_name": n, "configuration_keys": None} for n in names
        ],
        "include_synonyms": False,
        "include_documentation": documentation,
    }
    (response,) = yield [
        Call(
            ApiKey.DESCRIBE_CONFIGS,
            values,
            _config_route(kind, names[0]),
            what=what,
            check=lambda r: first_error(
                r.results, lambda x: f"DescribeConfigs of {x.resource_name or 'all brokers'}"
            ),
        )
    ]
    return {r.resource_name: [_entry(c) for c in r.configs] for r in response.results}


def _entry(config: Any) -> ConfigEntry:
    source = SOURCES.get(int(getattr(config, "config_source", 0)), "unknown")
    documentation = getattr(config, "documentation", None)
    return ConfigEntry(
        config.name, config.value, source, config.read_only, config.is_sensitive, documentation
    )


def _config_route(kind: int, name: str) -> Route:
    return ToNode(int(name)) if kind == BROKER and name else Anywhere()


def log_sizes(topic: TopicMetadata, patience_ms: int | None = None) -> Operation[dict[int, int]]:
    """Bytes on disk by partition, from DescribeLogDirs of the leaders: others may be away. Given
    ``patience_ms``, a leader that does not answer within it is done without.
    """
    by_leader: dict[int, list[int]] = {}
    for number, partition in topic.partitions.items():
        if partition.leader >= 0:
            by_leader.setdefault(partition.leader, []).append(number)
    calls = [
        Call(
            ApiKey.DESCRIBE_LOG_DIRS,
            {"topics": [{"topic": topic.name, "partitions": tuple(numbers)}]},
            ToNode(leader),
        )
        for leader, numbers in by_leader.items()
    ]
    for call in calls:
        if patience_ms is not None:
            call.optional, call.timeout_ms = True, patience_ms
    responses = yield calls
    return {
        int(found.partition_index): int(found.partition_size)
        for response in responses
        if not isinstance(response, KeptError)
        for directory in response.results
        for topic_found in directory.topics
        for found in topic_found.partitions
        if not found.is_future_key
    }


def run_concurrently(*operations: Operation[Any]) -> Operation[list[Any]]:
    """Operations side by side: the calls of all at once; their results. An error ends all."""
    results: list[Any] = [None] * len(operations)
    answers: dict[int, Any] = dict.fromkeys(range(len(operations)))
    while answers:
        requested = {}
        for number, responses in answers.items():
            try:
                requested[number] = operations[number].send(responses)
            except StopIteration as end:
                results[number] = end.value
        if requested:
            came = iter((yield [call for calls in requested.values() for call in calls]))
        answers = {number: [next(came) for _ in calls] for number, calls in requested.items()}
    return results
