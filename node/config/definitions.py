"""Every broker setting that kept honours, with Kafka's name, type, default and range.

What Kafka knows and kept accepts without effect, or refuses, is in
``kept.node.config.unsupported``; :data:`BROKER_SETTINGS` is all of them. A broker setting that
gives topics their default takes type and range from the topic setting
(``kept.node.config.topic_config``), so that they cannot disagree.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from kept.node.config.topic_config import TOPIC_SETTINGS, ConfigDef, Kind, Settings, Update
from kept.node.config.unsupported import ACCEPTED
from kept.storage.types import MAX_INT32, MAX_INT64

_BOOLEAN: Final = Kind.BOOLEAN
_INT: Final = Kind.INT
_LONG: Final = Kind.LONG
_DOUBLE: Final = Kind.DOUBLE
_STRING: Final = Kind.STRING
_LIST: Final = Kind.LIST
_READ_ONLY: Final = Update.READ_ONLY
_MAX_INT: Final = str(MAX_INT32)


def _at_start(name: str, kind: Kind, default: str | None, doc: str, **more: Any) -> ConfigDef:
    """A setting that is read when the node starts."""
    return ConfigDef(name, kind, default, doc, update=_READ_ONLY, **more)


def _topic_defaults() -> list[ConfigDef]:
    """The strongest broker synonym of every topic setting: same type, range and default."""
    nullable = {"log.flush.interval.ms", "log.retention.ms", "log.roll.jitter.ms", "log.roll.ms"}
    found = []
    for topic_setting in TOPIC_SETTINGS.values():
        if topic_setting.synonyms:
            name = topic_setting.synonyms[0].name
            found.append(
                replace(
                    topic_setting,
                    name=name,
                    default=None if name in nullable else topic_setting.default,
                    doc=f"Default of the topic setting {topic_setting.name}: {topic_setting.doc}",
                    synonyms=(),
                )
            )
    return found


_IDENTITY: Final = (
    _at_start(
        "node.id", _INT, "0",
        "This node's number in its cluster. To be set where controller.quorum.voters is.", low=0,
    ),
    _at_start(
        "broker.id", _INT, None,
        "Older name of node.id; the same number if both are given.", low=-1,
    ),
    _at_start(
        "process.roles", _LIST, "broker,controller",
        "What this node does: hold replicas and serve clients (broker), vote on and decide about "
        "the metadata (controller), or both. A broker that is no controller follows the metadata "
        "log of controller.quorum.voters.", choices=("broker", "controller"),
    ),
    _at_start(
        "controller.quorum.voters", _LIST, "",
        "Voters of the metadata log, as id@host:port of their node listeners; the same list on "
        "every node. Read while a node's metadata log is empty, afterwards the log's own voters "
        "count (kept cluster voter). Without it a node is its own voter, a cluster of one.",
    ),
    _at_start(
        "broker.rack", _STRING, None,
        "Where this node stands, for the placement of replicas and for clients.",
    ),
    _at_start(
        "listeners", _LIST, "PLAINTEXT://localhost:9092",
        "Addresses to serve clients on, as NAME://host:port. localhost binds 127.0.0.1, and ::1 "
        "where there is IPv6; an empty host or 0.0.0.0 binds every interface and needs "
        "advertised.listeners. A node of several has a listener for other nodes besides, NODE: "
        "where it is not named, on the same host and the first client port + 1000.",
    ),
    _at_start(
        "advertised.listeners", _LIST, None,
        "Addresses that clients, and for the node listener other nodes, are told, by listener "
        "name; without it those of listeners.",
    ),
    _at_start(
        "listener.security.protocol.map", _LIST,
        "PLAINTEXT:PLAINTEXT,NODE:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "Security protocol of each listener name. Only PLAINTEXT is served.",
    ),
    _at_start(
        "inter.broker.listener.name", _STRING, None,
        "Listener that nodes reach each other on; equal to controller.listener.names. Default: "
        "NODE. A lone node binds none.",
    ),
    _at_start(
        "controller.listener.names", _LIST, None,
        "Listener of the metadata log; equal to inter.broker.listener.name.",
    ),
    _at_start(
        "log.dirs", _LIST, None,
        "Directories of partitions, one per disk. Default: log.dir, else ./data/log.",
    ),
    _at_start(
        "log.dir", _LIST, None,
        "Older name of log.dirs.",
    ),
    _at_start(
        "metadata.log.dir", _STRING, None,
        "Directory of the metadata log, outside log.dirs. Default: beside the first log dir.",
    ),
)  # fmt: skip

_CLUSTER: Final = (
    _at_start(
        "broker.session.timeout.ms", _INT, "9000",
        "A broker of which the controller hears nothing for so long is fenced: others lead its "
        "partitions. (One whose process ends is fenced at once.)", low=100,
    ),
    _at_start(
        "broker.heartbeat.interval.ms", _INT, "2000",
        "How often a broker tells the controller that it lives.", low=10,
    ),
    _at_start(
        "initial.broker.registration.timeout.ms", _INT, "60000",
        "A broker that starts and is not registered by a controller within this time ends, with "
        "exit code 1.", low=100,
    ),
    _at_start(
        "kept.stall.ms", _INT, "2000",
        "A node that finds that it did not run for so long (it was stopped, or its machine was) "
        "serves nothing until the controller has answered it: it may have been fenced. With the "
        "heartbeat interval it must be below the session timeout.", low=50,
    ),
    _at_start(
        "controlled.shutdown.enable", _BOOLEAN, "true",
        "Whether a node that is stopped has its partitions led by others first.",
    ),
    _at_start(
        "kept.shutdown.timeout.ms", _INT, "30000",
        "How long a stopping node waits for that.", low=0,
    ),
    _at_start(
        "controller.quorum.fetch.timeout.ms", _INT, "2000",
        "A voter that hears nothing of the leader for so long, up to twice as long by chance, "
        "stands for election, and a leader that no majority answers for so long steps down. (A "
        "leader whose process ends is replaced at once.)", low=100,
    ),
    _at_start(
        "controller.quorum.election.timeout.ms", _INT, "1000",
        "A voter that stands for election and does not get a majority for so long, up to twice as "
        "long by chance, begins again.", low=100,
    ),
    _at_start(
        "metadata.log.max.record.bytes.between.snapshots", _LONG, "4194304",
        "A metadata log that is larger than this, and than the last snapshot, is replaced by a "
        "snapshot. (Kafka's default is 20971520; a small log starts faster.)", low=1,
    ),
    _at_start(
        "controller.quorum.request.timeout.ms", _INT, "2000",
        "How long a call to the controller waits for its answer before it is tried again.",
        low=100,
    ),
    _at_start(
        "auto.leader.rebalance.enable", _BOOLEAN, "true",
        "Whether leadership goes back to the preferred replicas by itself.",
    ),
    _at_start(
        "leader.imbalance.check.interval.seconds", _LONG, "300",
        "How often that is looked at.", low=1,
    ),
    _at_start(
        "kept.unclean.recovery.wait.ms", _LONG, "30000",
        "How long a partition whose whole ISR restarted after a crash waits for all of it, so that "
        "the longest log leads; then unclean.leader.election.enable decides whether what is there "
        "may do, else it stays offline and names the missing node.", low=0,
    ),
)  # fmt: skip

_REPLICATION: Final = (
    _at_start(
        "replica.lag.time.max.ms", _LONG, "30000",
        "A follower that has not caught up for so long leaves the ISR.", low=10,
    ),
    ConfigDef(
        "num.replica.fetchers", _INT, "1",
        "Connections to fetch over from each leader.", low=1, high=64,
    ),
    _at_start(
        "replica.fetch.min.bytes", _INT, "1",
        "Bytes that a leader collects before it answers a follower's fetch.", low=0,
    ),
    _at_start(
        "replica.fetch.wait.max.ms", _INT, "500",
        "How long it collects them; below replica.lag.time.max.ms.", low=0,
    ),
    _at_start(
        "replica.fetch.max.bytes", _INT, "1048576",
        "Bytes of one partition in one answer to a follower; a larger batch is sent whole.", low=0,
    ),
    _at_start(
        "replica.fetch.response.max.bytes", _INT, "10485760",
        "Bytes of one answer to a follower.", low=0,
    ),
    _at_start(
        "replica.fetch.backoff.ms", _INT, "1000",
        "Longest pause of a follower after an error; the first is 10 ms.", low=0,
    ),
    _at_start(
        "replica.socket.timeout.ms", _INT, "30000",
        "A leader that does not answer a follower's fetch for so long, beyond what it may collect, "
        "is connected to anew.", low=1,
    ),
    _at_start(
        "socket.connection.setup.timeout.ms", _LONG, "10000",
        "How long a connection to a leader may take.", low=1,
    ),
    ConfigDef(
        "leader.replication.throttled.rate", _LONG, str(MAX_INT64),
        "Bytes a second that this node gives to followers that are not in sync, of the replicas "
        "that leader.replication.throttled.replicas of their topics name; taken over 11 s.", low=0,
    ),
    ConfigDef(
        "follower.replication.throttled.rate", _LONG, str(MAX_INT64),
        "Bytes a second that this node fetches for replicas here that are not in sync and that "
        "follower.replication.throttled.replicas of their topics name; taken over 11 s.", low=0,
    ),
    _at_start(
        "replica.selector.class", _STRING, None,
        "Which replica a consumer is told to fetch from (KIP-392): without it the leader, with "
        "RackAwareReplicaSelector an in-sync one of its client.rack, where there is one.",
        choices=("", "org.apache.kafka.common.replica.RackAwareReplicaSelector"),
    ),
)  # fmt: skip

_TOPICS: Final = (
    _at_start(
        "num.partitions", _INT, "1",
        "Partitions of a topic that is created without a number.", low=1,
    ),
    _at_start(
        "default.replication.factor", _INT, "1",
        "Replicas of a topic that is created without a number.", low=1,
    ),
    _at_start(
        "auto.create.topics.enable", _BOOLEAN, "true",
        "Whether a client that asks for an unknown topic creates it.",
    ),
    _at_start(
        "delete.topic.enable", _BOOLEAN, "true",
        "Whether topics may be deleted.",
    ),
    _at_start(
        "max.request.partition.size.limit", _INT, "2000",
        "Partitions in one answer of DescribeTopicPartitions.", low=1,
    ),
)  # fmt: skip

_LOG: Final = (
    _at_start(
        "log.roll.hours", _INT, "168",
        "log.roll.ms in hours, where that is not set.", low=1,
    ),
    _at_start(
        "log.roll.jitter.hours", _INT, "0",
        "log.roll.jitter.ms in hours, where that is not set.", low=0,
    ),
    _at_start(
        "log.retention.minutes", _INT, None,
        "log.retention.ms in minutes, where that is not set.", low=-1,
    ),
    _at_start(
        "log.retention.hours", _INT, "168",
        "log.retention.ms in hours, where neither that nor the minutes are set.", low=-1,
    ),
    _at_start(
        "log.retention.check.interval.ms", _LONG, "300000",
        "How often retention looks for segments to delete and idle segments to roll.", low=1,
    ),
    _at_start(
        "log.flush.scheduler.interval.ms", _LONG, str(MAX_INT64),
        "flush.ms of topics where neither they nor log.flush.interval.ms say.", low=0,
    ),
    _at_start(
        "log.flush.offset.checkpoint.interval.ms", _INT, "60000",
        "How often recovery points are written; after a crash a log is read from there.", low=1,
    ),
    _at_start(
        "log.flush.start.offset.checkpoint.interval.ms", _INT, "60000",
        "How often log start offsets are written.", low=1,
    ),
    _at_start(
        "replica.high.watermark.checkpoint.interval.ms", _LONG, "5000",
        "How often high watermarks are written.", low=1,
    ),
    ConfigDef(
        "producer.id.expiration.ms", _INT, "86400000",
        "How long an idle producer's sequence numbers are remembered.", low=1,
    ),
    _at_start(
        "kept.fsync.threads", _INT, "4",
        "Threads that fsync, for each log directory.", low=1, high=64,
    ),
)  # fmt: skip

_CLEANER: Final = (
    _at_start(
        "log.cleaner.enable", _BOOLEAN, "true",
        "Whether compacted topics are compacted.",
    ),
    ConfigDef(
        "log.cleaner.threads", _INT, "1",
        "Worker processes that compact, at most.", low=0, high=64,
    ),
    ConfigDef(
        "log.cleaner.dedupe.buffer.size", _LONG, "134217728",
        "Memory for the offset maps of all workers together. What does not fit takes further "
        "passes.", low=1 << 20,
    ),
    ConfigDef(
        "log.cleaner.io.buffer.load.factor", _DOUBLE, "0.9",
        "How full an offset map may get.", low=0.1, high=0.95,
    ),
    ConfigDef(
        "log.cleaner.backoff.ms", _LONG, "15000",
        "How long the cleaner sleeps when no log needs it.", low=0,
    ),
    ConfigDef(
        "log.cleaner.io.max.bytes.per.second", _DOUBLE, "1.7976931348623157E308",
        "Bytes that the cleaner reads and writes in a second, at most.", low=1,
    ),
    _at_start(
        "kept.compaction.history.bytes", _LONG, "16777216",
        "Disk, per partition, for the journal of what compaction removed and why "
        "(kept compact why-missing).", low=0,
    ),
    _at_start(
        "kept.compaction.check.keys", _INT, "64",
        "Keys that each pass samples, to prove their latest records right before anything is put "
        "into place; fewer in small logs. 0: none.", low=0, high=255,
    ),
)  # fmt: skip

_NETWORK: Final = (
    _at_start(
        "socket.request.max.bytes", _INT, "104857600",
        "Largest request; a connection that announces more is closed.", low=1,
    ),
    _at_start(
        "socket.listen.backlog.size", _INT, "50",
        "Connections that wait to be accepted; the system may allow fewer.", low=1,
    ),
    _at_start(
        "connections.max.idle.ms", _LONG, "600000",
        "A connection without requests is closed after this; negative: never.",
    ),
    ConfigDef(
        "max.connections", _INT, _MAX_INT,
        "Connections at a time, all listeners of clients together, in every protocol; fewer where "
        "open files (RLIMIT_NOFILE), less one for each replica and an eighth (at most 500), leave "
        "fewer. For those between nodes there is kept.node.max.connections.", low=0,
    ),
    ConfigDef(
        "max.connections.per.ip", _INT, _MAX_INT,
        "Connections at a time from one address, to all listeners of clients together, in every "
        "protocol.", low=0,
    ),
    _at_start(
        "max.incremental.fetch.session.cache.slots", _INT, "1000",
        "Fetch sessions that are remembered.", low=0,
    ),
    _at_start(
        "kept.fetch.sessions.max.partitions", _INT, "250000",
        "Partitions of all fetch sessions, and of other fetches that wait for records; each costs "
        "0.4 to 0.9 KB. Above, larger sessions give way to smaller ones, whose clients then name "
        "all their partitions with every fetch.", low=1000,
    ),
    _at_start(
        "kept.producers.max", _LONG, "500000",
        "Idempotent producers that all logs of this node remember, some 0.5 KB each, to recognize "
        "what they send again; one log remembers 10,000. Above, a new one takes the place of one "
        "of its log that has been silent for long. See producer.id.expiration.ms.", low=1000,
    ),
    _at_start(
        "fetch.max.bytes", _INT, "57671680",
        "Bytes of records in one Fetch response, whatever is asked; a first batch that is larger "
        "is sent whole.", low=1024,
    ),
    _at_start(
        "kept.inflight.max.bytes", _LONG, "1073741824",
        "Bytes of unanswered requests and unsent responses of all connections, and of what batches "
        "inflate to in threads; reading pauses above.", low=1 << 20,
    ),
    _at_start(
        "kept.inflight.max.bytes.per.ip", _LONG, None,
        "Bytes of unanswered requests and unsent responses of the connections from one address; "
        "they are not read above, others are. Raise it where all clients come through one proxy. "
        "Default: a quarter of kept.inflight.max.bytes.", low=1 << 18,
    ),
    _at_start(
        "kept.inflating.max.bytes", _LONG, None,
        "Bytes of kept.inflight.max.bytes that threads may hold inflated batches in; further "
        "batches wait their turn, and one that needs more is alone. Default: a quarter of it.",
        low=1 << 18,
    ),
    _at_start(
        "kept.connection.inflight.max.bytes", _INT, "16777216",
        "Bytes of responses that one connection's client has not taken; its next requests wait "
        "above.", low=1024,
    ),
    _at_start(
        "kept.connection.inflight.max.requests", _INT, "1000",
        "Unanswered requests of one connection; the next ones wait.", low=1,
    ),
    _at_start(
        "kept.request.max.entries", _INT, "25000",
        "Entries of one request: elements of its arrays, on all levels, and tagged fields. A "
        "request with more is refused before it is decoded. A consumer of 10,000 partitions, "
        "each of a topic of its own, sends 20,001.", low=100,
    ),
    _at_start(
        "kept.auto.create.max.topics", _INT, "100",
        "Topics that one Metadata request creates where auto.create.topics.enable is on; for the "
        "others it says LEADER_NOT_AVAILABLE, after which clients ask again. Each is an entry of "
        "the metadata log, made one after the other.", low=1,
    ),
    _at_start(
        "kept.request.receive.ms", _LONG, "60000",
        "A connection whose request does not come in whole within this is closed: its client has "
        "given up (request.timeout.ms is 30 s), and its bytes are reserved meanwhile.", low=100,
    ),
    _at_start(
        "kept.silent.ms", _LONG, "10000",
        "A connection whose first four bytes do not come within this is closed: every client of "
        "this port speaks first. What comes later is connections.max.idle.ms's.", low=100,
    ),
    _at_start(
        "kept.silent.max.connections", _INT, "4096",
        "Connections of one listener that have not sent four bytes yet; beyond, the oldest is "
        "closed.", low=1,
    ),
    _at_start(
        "kept.node.max.connections", _INT, "1024",
        "Connections at a time on the listener between nodes. Clients' are not counted with them, "
        "and so keep no node from the others; for one more an idle one is closed, if there is any.",
        low=16,
    ),
    _at_start(
        "kept.inflated.max.bytes", _INT, "268435456",
        "Largest size of one batch after decompression; more is refused as a bomb.",
        low=1 << 16, high=MAX_INT32,
    ),
    _at_start(
        "kept.http.request.max.bytes", _INT, "1048576",
        "Largest HTTP request, headers and body.", low=1024, high=1 << 28,
    ),
    _at_start(
        "kept.http.idle.ms", _LONG, "30000",
        "An HTTP connection that sends no whole request for so long is closed.", low=100,
    ),
    _at_start(
        "kept.http.max.connections", _INT, "256",
        "HTTP connections at a time; for one more the longest idle one is ended, else it gets 503.",
        low=1,
    ),
    _at_start(
        "kept.http.hosts", _LIST, "",
        "Host names, beyond localhost, this machine's and the listeners' own, that may appear in "
        "the Host header of HTTP requests (/healthz and /readyz take any; addresses always pass).",
    ),
    _at_start(
        "kept.console.actions", _BOOLEAN, "false",
        "Whether the console's buttons work (compact now, elect the preferred leader). Without it "
        "a POST that a browser sends is refused; commands and curl are not concerned.",
    ),
    _at_start(
        "kept.console.max.streams", _INT, "16",
        "Pages of the console that are told at once what moves; the others ask from time to time.",
        low=0,
    ),
    _at_start(
        "kept.grpc.max.connections", _INT, "256",
        "gRPC connections at a time; more are closed.", low=1,
    ),
    _at_start(
        "kept.grpc.max.requests", _INT, "256",
        "gRPC calls at a time, streams included; more are answered RESOURCE_EXHAUSTED. Each holds "
        "a Kafka connection to a leader and what it reads ahead, about a megabyte.", low=1,
    ),
    _at_start(
        "kept.grpc.request.max.bytes", _INT, "4194304",
        "Largest message of a gRPC client.", low=1024, high=1 << 30,
    ),
)  # fmt: skip

_GROUPS: Final = (
    _at_start(
        "group.min.session.timeout.ms", _INT, "6000",
        "Shortest session timeout of a group's member.", low=1,
    ),
    _at_start(
        "group.max.session.timeout.ms", _INT, "1800000",
        "Longest session timeout of a group's member.", low=1,
    ),
    _at_start(
        "group.initial.rebalance.delay.ms", _INT, "3000",
        "How long an empty group waits for more members before its first rebalance. A cluster of "
        "one uses 0 unless set.", low=0,
    ),
    _at_start(
        "group.max.size", _INT, "2000",
        "Members of a group, at most. A group forms its generation, and takes its assignment, at a "
        "stretch, some 10 us a member, in which nobody else is served; a record of 1 MiB holds "
        "some 3,500. Kafka has no limit unless it is set.", low=1,
    ),
    _at_start(
        "kept.group.max.bytes", _INT, "16777216",
        "Memory of one group's members: ids, subscriptions, assignments. Whoever would join above "
        "gets GROUP_MAX_SIZE_REACHED. (A group of which more than message.max.bytes is assigned "
        "cannot be stored anyway.)", low=1 << 16,
    ),
    _at_start(
        "kept.groups.max.bytes", _LONG, "536870912",
        "Memory of all groups that this node coordinates, offsets included (about 0.5 KB each). "
        "Above, nobody new may join, and offsets of further partitions are refused; members stay, "
        "and what was committed before may be committed anew. Records that wait for replicas count "
        "(about 1 KB an offset), and may take an eighth more; beyond, COORDINATOR_NOT_AVAILABLE.",
        low=1 << 20,
    ),
    _at_start(
        "offsets.topic.num.partitions", _INT, "50",
        "Partitions of __consumer_offsets; fixed once it exists.", low=1,
    ),
    _at_start(
        "offsets.topic.replication.factor", Kind.SHORT, "3",
        "Replicas of __consumer_offsets; no more than there are brokers.", low=1,
    ),
    _at_start(
        "offsets.topic.segment.bytes", _INT, "104857600",
        "Segment size of __consumer_offsets.", low=1024,
    ),
    _at_start(
        "offset.metadata.max.bytes", _INT, "4096",
        "Longest metadata text of a committed offset.", low=0,
    ),
    _at_start(
        "offsets.retention.minutes", _INT, "10080",
        "How long offsets of an empty group are kept.", low=1,
    ),
    _at_start(
        "offsets.retention.check.interval.ms", _LONG, "600000",
        "How often offsets are checked for their age.", low=1,
    ),
    _at_start(
        "offsets.commit.timeout.ms", _INT, "5000",
        "How long a commit waits for the replicas.", low=1,
    ),
)  # fmt: skip

_OURS: Final = (
    _at_start(
        "kept.log.format", _STRING, "text",
        "How the node's own log lines look: key=value text, or one JSON object a line.",
        choices=("text", "json"),
    ),
    _at_start(
        "kept.log.level", _STRING, "info",
        "Which of its log lines the node writes.",
        choices=("debug", "info", "warning", "error"),
    ),
    _at_start(
        "kept.metrics.partitions", _STRING, "some",
        "Series per partition: some = above the dirty target, uncleanable, under-replicated or "
        "offline; all = every one.", choices=("some", "all"),
    ),
)  # fmt: skip

HONOURED: Final = Settings(
    "broker",
    (
        *_IDENTITY,
        *_CLUSTER,
        *_REPLICATION,
        *_TOPICS,
        *_topic_defaults(),
        *_LOG,
        *_CLEANER,
        *_NETWORK,
        *_GROUPS,
        *_OURS,
    ),
)
"""What has an effect, in the order of the documentation."""

BROKER_SETTINGS: Final = Settings("broker", (*HONOURED.values(), *ACCEPTED))
"""Every broker setting by name: honoured, accepted without effect, or refused with the reason."""
