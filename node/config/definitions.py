"""The table of settings: every setting that kept honours is one row here, and nowhere else.

A row gives type, default, range, whether it can change while the node runs, and what it means; its
name is that of the field, with dots for underscores, and ``kept.`` before it for those that are
``ours``. A setting of nodes is a field of :class:`NodeSettings`, so that ``config.fetch_max_bytes``
is typed and needs no second declaration. Where it is the default of a setting of topics, the row
names that (``topic``), and whatever else gives that default in another unit (``weaker``): type,
range and meaning are the same for both. What only topics have is in :class:`TopicOnly`.

What Kafka knows and kept accepts without effect, or refuses, is in
``kept.node.config.unsupported_settings``. ``docs/configuration.md``, validation, DescribeConfigs
and the configuration file follow from here. Long because there is a row for each setting.
"""

from __future__ import annotations

from typing import Final

from kept.node.config.bootstrap_scram import parse_bootstrap_scram
from kept.node.config.checks import (
    check_authorizer_class,
    check_not_blank,
    check_strategy_name,
    check_super_users,
    check_throttled,
    parse_prefixes,
)
from kept.node.config.config_def import ConfigType, Row, Rows, Settings
from kept.node.config.listeners import ConfiguredVoter, ListenerConfig
from kept.node.config.unsupported_settings import NO_TIERS, UNSUPPORTED
from kept.storage.types import MAX_INT32, MAX_INT64

_boolean: Final = Rows[bool](ConfigType.BOOLEAN)
_integer: Final = Rows[int](ConfigType.INT)
_short: Final = Rows[int](ConfigType.SHORT)
_long: Final = Rows[int](ConfigType.LONG)
_double: Final = Rows[float](ConfigType.DOUBLE)
_string: Final = Rows[str](ConfigType.STRING)
_listing: Final = Rows[tuple[str, ...]](ConfigType.LIST)
_secret: Final = Rows[str](ConfigType.PASSWORD)

_MINUTE: Final = 60_000
_HOUR: Final = 3_600_000
_UNLIMITED: Final = str(MAX_INT32)
_FOREVER: Final = str(MAX_INT64)
_NO_LOCAL_PART: Final = f"{NO_TIERS}; the whole log is local."


class NodeSettings:
    """The settings of a node, by field. Those with an explicit type are resolved from others."""

    # Identity and addresses.

    node_id = _integer("0", low=0).means(
        "This node's number in its cluster. To be set where controller.quorum.voters is."
    )
    broker_id = Row[int](ConfigType.INT, None, low=-1).means(
        "Older name of node.id; the same number if both are given."
    )
    process_roles = _listing("broker,controller", choices=("broker", "controller")).means(
        "What this node does: hold replicas and serve clients (broker), vote on and decide about "
        "the metadata (controller), or both. A broker that is no controller follows the metadata "
        "log of controller.quorum.voters."
    )
    controller_quorum_voters = Row[tuple[ConfiguredVoter, ...]](ConfigType.LIST, "").means(
        "Voters of the metadata log, as id@host:port of their node listeners; the same list on "
        "every node. Read while a node's metadata log is empty, afterwards the log's own voters "
        "count (kept cluster voter). Without it a node is its own voter, a cluster of one."
    )
    broker_rack = _string(None).means(
        "Where this node stands, for the placement of replicas and for clients."
    )
    listeners = Row[tuple[ListenerConfig, ...]](
        ConfigType.LIST, "PLAINTEXT://localhost:9092"
    ).means(
        "Addresses to serve clients on, as NAME://host:port. localhost binds 127.0.0.1, and ::1 "
        "where there is IPv6; an empty host or 0.0.0.0 binds every interface and needs "
        "advertised.listeners. A node of several has a listener for other nodes besides, NODE: "
        "where it is not named, on the same host and the first client port + 1000."
    )
    advertised_listeners = Row[tuple[ListenerConfig, ...]](ConfigType.LIST, None).means(
        "Addresses that clients, and for the node listener other nodes, are told, by listener "
        "name; without it those of listeners."
    )
    listener_security_protocol_map = _listing(
        "PLAINTEXT:PLAINTEXT,NODE:PLAINTEXT,CONTROLLER:PLAINTEXT"
    ).means(
        "Security protocol of each listener name: PLAINTEXT, SSL (TLS), SASL_PLAINTEXT or SASL_SSL "
        "(clients log in). Between nodes: PLAINTEXT or SSL."
    )
    inter_broker_listener_name = _string(None).means(
        "Listener that nodes reach each other on; equal to controller.listener.names. Default: "
        "NODE. A lone node binds none."
    )
    controller_listener_names = _listing(None).means(
        "Listener of the metadata log; equal to inter.broker.listener.name."
    )
    log_dirs = Row[tuple[str, ...]](ConfigType.LIST, None).means(
        "Directories of partitions, one per disk. Default: log.dir, else ./data/log."
    )
    log_dir = _listing(None).means("Older name of log.dirs.")
    metadata_log_dir = Row[str](ConfigType.STRING, None).means(
        "Directory of the metadata log, outside log.dirs. Default: beside the first log dir."
    )

    # The cluster.

    broker_session_timeout_ms = _integer("9000", low=100).means(
        "A broker of which the controller hears nothing for so long is fenced: others lead its "
        "partitions. (One whose process ends is fenced at once.)"
    )
    broker_heartbeat_interval_ms = _integer("2000", low=10).means(
        "How often a broker tells the controller that it lives."
    )
    initial_broker_registration_timeout_ms = _integer("60000", low=100).means(
        "A broker that starts and is not registered by a controller within this time ends, with "
        "exit code 1."
    )
    stall_ms = _integer("2000", low=50, ours=True).means(
        "A node that finds that it did not run for so long (it was stopped, or its machine was) "
        "serves nothing until the controller has answered it: it may have been fenced. With the "
        "heartbeat interval it must be below the session timeout."
    )
    controlled_shutdown_enable = _boolean("true").means(
        "Whether a node that is stopped has its partitions led by others first."
    )
    shutdown_timeout_ms = _integer("30000", low=0, ours=True).means(
        "How long a stopping node waits for that."
    )
    controller_quorum_fetch_timeout_ms = _integer("2000", low=100).means(
        "A voter that hears nothing of the leader for so long, up to twice as long by chance, "
        "stands for election, and a leader that no majority answers for so long steps down. (A "
        "leader whose process ends is replaced at once.)"
    )
    controller_quorum_election_timeout_ms = _integer("1000", low=100).means(
        "A voter that stands for election and does not get a majority for so long, up to twice as "
        "long by chance, begins again."
    )
    metadata_log_max_record_bytes_between_snapshots = _long("4194304", low=1).means(
        "A metadata log that is larger than this, and than the last snapshot, is replaced by a "
        "snapshot. (Kafka's default is 20971520; a small log starts faster.)"
    )
    controller_quorum_request_timeout_ms = _integer("2000", low=100).means(
        "How long a call to the controller waits for its answer before it is tried again."
    )
    auto_leader_rebalance_enable = _boolean("true").means(
        "Whether leadership goes back to the preferred replicas by itself."
    )
    leader_imbalance_check_interval_seconds = _long("300", low=1).means(
        "How often that is looked at."
    )
    unclean_recovery_wait_ms = _long("30000", low=0, ours=True).means(
        "How long a partition whose whole ISR restarted after a crash waits for all of it, so that "
        "the longest log leads; then unclean.leader.election.enable decides whether what is there "
        "may do, else it stays offline and names the missing node."
    )

    # Replication.

    replica_lag_time_max_ms = _long("30000", low=10).means(
        "A follower that has not caught up for so long leaves the ISR."
    )
    num_replica_fetchers = _integer("1", low=1, high=64, dynamic=True).means(
        "Connections to fetch over from each leader."
    )
    replica_fetch_min_bytes = _integer("1", low=0).means(
        "Bytes that a leader collects before it answers a follower's fetch."
    )
    replica_fetch_wait_max_ms = _integer("500", low=0).means(
        "How long it collects them; below replica.lag.time.max.ms."
    )
    replica_fetch_max_bytes = _integer("1048576", low=0).means(
        "Bytes of one partition in one answer to a follower; a larger batch is sent whole."
    )
    replica_fetch_response_max_bytes = _integer("10485760", low=0).means(
        "Bytes of one answer to a follower."
    )
    replica_fetch_backoff_ms = _integer("1000", low=0).means(
        "Longest pause of a follower after an error; the first is 10 ms."
    )
    replica_socket_timeout_ms = _integer("30000", low=1).means(
        "A leader that does not answer a follower's fetch for so long, beyond what it may collect, "
        "is connected to anew."
    )
    socket_connection_setup_timeout_ms = _long("10000", low=1).means(
        "How long a connection to a leader may take."
    )
    leader_replication_throttled_rate = _long(_FOREVER, low=0, dynamic=True).means(
        "Bytes a second that this node gives to followers that are not in sync, of the replicas "
        "that leader.replication.throttled.replicas of their topics name; taken over 11 s."
    )
    follower_replication_throttled_rate = _long(_FOREVER, low=0, dynamic=True).means(
        "Bytes a second that this node fetches for replicas here that are not in sync and that "
        "follower.replication.throttled.replicas of their topics name; taken over 11 s."
    )
    replica_selector_class = _string(
        None, choices=("", "org.apache.kafka.common.replica.RackAwareReplicaSelector")
    ).means(
        "Which replica a consumer is told to fetch from (KIP-392): without it the leader, with "
        "RackAwareReplicaSelector an in-sync one of its client.rack, where there is one."
    )

    # Topics.

    num_partitions = _integer("1", low=1).means(
        "Partitions of a topic that is created without a number."
    )
    default_replication_factor = _integer("1", low=1).means(
        "Replicas of a topic that is created without a number."
    )
    auto_create_topics_enable = _boolean("true").means(
        "Whether a client that asks for an unknown topic creates it."
    )
    delete_topic_enable = _boolean("true").means("Whether topics may be deleted.")
    max_request_partition_size_limit = _integer("2000", low=1).means(
        "Partitions in one answer of DescribeTopicPartitions."
    )

    # Defaults of topics: a topic may have its own.

    log_cleanup_policy = _listing(
        "delete", choices=("compact", "delete"), topic="cleanup.policy"
    ).means(
        "What happens to old segments: delete by time and size, compact to the latest record of "
        "every key, both, or nothing (an empty list)."
    )
    compression_gzip_level = _integer(
        "-1", low=1, high=9, also=(-1,), topic="compression.gzip.level"
    ).means("Level with which the broker compresses gzip; -1 is the codec's default.")
    compression_lz4_level = _integer("9", low=1, high=17, topic="compression.lz4.level").means(
        "Level with which the broker compresses lz4."
    )
    compression_type = _string(
        "producer",
        choices=("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
        topic="compression.type",
    ).means("Codec of the batches in the log; 'producer' keeps the producer's.")
    compression_zstd_level = _integer(
        "3", low=-131072, high=22, topic="compression.zstd.level"
    ).means("Level with which the broker compresses zstd.")
    log_cleaner_delete_retention_ms = _long("86400000", low=0, topic="delete.retention.ms").means(
        "How long a tombstone stays after the first pass that kept it: the time in which a "
        "consumer that reads from the start must be done to see every deletion."
    )
    log_segment_delete_delay_ms = _long("60000", low=0, topic="file.delete.delay.ms").means(
        "How long the files of a removed segment stay on disk."
    )
    log_flush_interval_messages = _long(_FOREVER, low=1, topic="flush.messages").means(
        "fsync after so many records; 1 makes every acknowledged record survive power loss."
    )
    log_flush_interval_ms = Row[int | None](
        ConfigType.LONG,
        _FOREVER,
        low=0,
        topic="flush.ms",
        weaker={"log.flush.scheduler.interval.ms": 1},
    ).means("fsync records that are older than this.")
    log_index_interval_bytes = _integer("4096", low=0, topic="index.interval.bytes").means(
        "Bytes of log between two entries of the offset index."
    )
    log_local_retention_bytes = _long(
        "-2", low=-2, topic="local.retention.bytes", no_effect=_NO_LOCAL_PART
    ).means("Bytes kept locally of a topic with tiered storage; -2 follows retention.bytes.")
    log_local_retention_ms = _long(
        "-2", low=-2, topic="local.retention.ms", no_effect=_NO_LOCAL_PART
    ).means("Milliseconds kept locally of a topic with tiered storage; -2 follows retention.ms.")
    log_cleaner_max_compaction_lag_ms = _long(_FOREVER, low=1, topic="max.compaction.lag.ms").means(
        "A record is compacted at the latest after this, whatever the dirty ratio."
    )
    message_max_bytes = _integer("1048588", low=0, topic="max.message.bytes").means(
        "Largest record batch, compressed, with its header."
    )
    log_message_timestamp_after_max_ms = _long(
        "3600000", low=0, topic="message.timestamp.after.max.ms"
    ).means("How far in the future a record's timestamp may lie (CreateTime only).")
    log_message_timestamp_before_max_ms = _long(
        _FOREVER, low=0, topic="message.timestamp.before.max.ms"
    ).means("How far in the past a record's timestamp may lie (CreateTime only).")
    log_message_timestamp_type = _string(
        "CreateTime", choices=("CreateTime", "LogAppendTime"), topic="message.timestamp.type"
    ).means("Whether records carry the producer's time or the broker's.")
    log_cleaner_min_cleanable_ratio = _double(
        "0.5", low=0, high=1, topic="min.cleanable.dirty.ratio"
    ).means("A log is compacted when the dirty share of its cleanable bytes is above this.")
    log_cleaner_min_compaction_lag_ms = _long("0", low=0, topic="min.compaction.lag.ms").means(
        "A record stays uncompacted at least this long."
    )
    min_insync_replicas = _integer("1", low=1, topic="min.insync.replicas").means(
        "In-sync replicas that a produce with acks=all needs; capped by the replica count."
    )
    log_preallocate = _boolean(
        "false",
        topic="preallocate",
        no_effect="segments grow as they are written; file systems on Linux need no help.",
    ).means("Whether a new segment's file gets its full size at once.")
    log_retention_bytes = _long("-1", topic="retention.bytes").means(
        "Bytes of a partition beyond which its oldest segments are deleted; -1: no limit."
    )
    log_retention_ms = Row[int | None](
        ConfigType.LONG,
        "604800000",
        low=-1,
        topic="retention.ms",
        weaker={"log.retention.minutes": _MINUTE, "log.retention.hours": _HOUR},
    ).means("Age at which segments are deleted; -1: no limit.")
    # Kafka refuses below 1 MiB; small segments are how one watches the cleaner at work.
    log_segment_bytes = _integer("1073741824", low=1024, topic="segment.bytes").means(
        "Size at which a segment is closed and a new one begun."
    )
    log_index_size_max_bytes = _integer("10485760", low=4, topic="segment.index.bytes").means(
        "Largest size of an index file; a full index closes the segment."
    )
    log_roll_jitter_ms = Row[int | None](
        ConfigType.LONG,
        "0",
        low=0,
        topic="segment.jitter.ms",
        weaker={"log.roll.jitter.hours": _HOUR},
    ).means("Largest random time taken off segment.ms, so that segments do not all roll at once.")
    log_roll_ms = Row[int | None](
        ConfigType.LONG, "604800000", low=1, topic="segment.ms", weaker={"log.roll.hours": _HOUR}
    ).means("Age at which a segment is closed even if it is not full.")
    unclean_leader_election_enable = _boolean(
        "false", topic="unclean.leader.election.enable"
    ).means("Whether a replica outside the ISR may lead when no other is left, losing records.")

    # Logs.

    log_roll_hours = _integer("168", low=1).means("log.roll.ms in hours, where that is not set.")
    log_roll_jitter_hours = _integer("0", low=0).means(
        "log.roll.jitter.ms in hours, where that is not set."
    )
    log_retention_minutes = _integer(None, low=-1).means(
        "log.retention.ms in minutes, where that is not set."
    )
    log_retention_hours = _integer("168", low=-1).means(
        "log.retention.ms in hours, where neither that nor the minutes are set."
    )
    log_retention_check_interval_ms = _long("300000", low=1).means(
        "How often retention looks for segments to delete and idle segments to roll."
    )
    log_flush_scheduler_interval_ms = _long(_FOREVER, low=0).means(
        "flush.ms of topics where neither they nor log.flush.interval.ms say."
    )
    log_flush_offset_checkpoint_interval_ms = _integer("60000", low=1).means(
        "How often recovery points are written; after a crash a log is read from there."
    )
    log_flush_start_offset_checkpoint_interval_ms = _integer("60000", low=1).means(
        "How often log start offsets are written."
    )
    replica_high_watermark_checkpoint_interval_ms = _long("5000", low=1).means(
        "How often high watermarks are written."
    )
    producer_id_expiration_ms = _integer("86400000", low=1, dynamic=True).means(
        "How long an idle producer's sequence numbers are remembered."
    )
    fsync_threads = _integer("4", low=1, high=64, ours=True).means(
        "Threads that fsync, for each log directory."
    )

    # The cleaner.

    log_cleaner_enable = _boolean("true").means("Whether compacted topics are compacted.")
    log_cleaner_threads = _integer("1", low=0, high=64, dynamic=True).means(
        "Worker processes that compact, at most."
    )
    log_cleaner_dedupe_buffer_size = _long("134217728", low=1 << 20, dynamic=True).means(
        "Memory for the offset maps of all workers together. What does not fit takes further "
        "passes."
    )
    log_cleaner_io_buffer_load_factor = _double("0.9", low=0.1, high=0.95, dynamic=True).means(
        "How full an offset map may get."
    )
    log_cleaner_backoff_ms = _long("15000", low=0, dynamic=True).means(
        "How long the cleaner sleeps when no log needs it."
    )
    log_cleaner_io_max_bytes_per_second = _double(
        "1.7976931348623157E308", low=1, dynamic=True
    ).means("Bytes that the cleaner reads and writes in a second, at most.")
    compaction_history_bytes = _long("16777216", low=0, ours=True).means(
        "Disk, per partition, for the journal of what compaction removed and why (kept compact "
        "why-missing)."
    )
    compaction_check_keys = _integer("64", low=0, high=255, ours=True).means(
        "Keys that each pass samples, to prove their latest records right before anything is put "
        "into place; fewer in small logs. 0: none."
    )

    # The network.

    socket_request_max_bytes = _integer("104857600", low=1).means(
        "Largest request; a connection that announces more is closed."
    )
    socket_listen_backlog_size = _integer("50", low=1).means(
        "Connections that wait to be accepted; the system may allow fewer. As many more wait for "
        "their turn where max.connection.creation.rate is set."
    )
    connections_max_idle_ms = _long("600000").means(
        "A connection without requests is closed after this; negative: never."
    )
    quota_window_num = _integer("11", low=1).means(
        "Samples over which a client's rate is taken (bytes, the loop's time), for its quotas."
    )
    quota_window_size_seconds = _integer("1", low=1, high=86_400).means("Seconds of such a sample.")
    controller_quota_window_num = _integer("11", low=1).means(
        "Times controller.quota.window.size.seconds: the seconds of its controller_mutation_rate "
        "that a client may use at once."
    )
    controller_quota_window_size_seconds = _integer("1", low=1, high=86_400).means(
        "See controller.quota.window.num."
    )
    max_connections = _integer(_UNLIMITED, low=0, dynamic=True).means(
        "Connections at a time, all listeners of clients together, in every protocol; fewer where "
        "open files (RLIMIT_NOFILE), less one for each replica and an eighth (at most 500), leave "
        "fewer. For those between nodes there is kept.node.max.connections."
    )
    max_connections_per_ip = _integer(_UNLIMITED, low=0, dynamic=True).means(
        "Connections at a time from one address, of IPv6 from its /64, to all listeners of clients "
        "together, in every protocol."
    )
    max_connection_creation_rate = _integer(_UNLIMITED, low=0, dynamic=True).means(
        "Connections a second that all listeners of clients together accept; more wait for their "
        "turn, unread, as many of a listener as socket.listen.backlog.size. With a listener's "
        "prefix: those of that one. Probes wait like others: give them a listener of their own "
        "where that matters."
    )
    max_incremental_fetch_session_cache_slots = _integer("1000", low=0).means(
        "Fetch sessions that are remembered."
    )
    fetch_sessions_max_partitions = _integer("250000", low=1000, ours=True).means(
        "Partitions of all fetch sessions, and of other fetches that wait for records; each costs "
        "0.4 to 0.9 KB, and a fetch that waits counts as three more. Above, larger sessions give "
        "way to smaller ones, whose clients then name all their partitions with every fetch."
    )
    producers_max = _long("500000", low=1000, ours=True).means(
        "Idempotent producers that all logs of this node remember, some 0.5 KB each, to recognize "
        "what they send again; one log remembers 10,000. Above, a new one takes the place of one "
        "of its log that has been silent for long. See producer.id.expiration.ms."
    )
    fetch_max_bytes = _integer("57671680", low=1024).means(
        "Bytes of records in one Fetch response, whatever is asked; a first batch that is larger "
        "is sent whole."
    )
    inflight_max_bytes = _long("1073741824", low=1 << 20, ours=True).means(
        "Bytes of unanswered requests and unsent responses of all connections, and of what batches "
        "inflate to in threads; reading pauses above."
    )
    inflight_max_bytes_per_ip = Row[int](ConfigType.LONG, None, low=1 << 18, ours=True).means(
        "Bytes of unanswered requests and unsent responses of the connections from one address; "
        "they are not read above, others are. One of IPv6 counts with its /64, so neighbours in "
        "one share it. Raise it where all clients come through one proxy or from one network of "
        "IPv6. Default: a quarter of kept.inflight.max.bytes."
    )
    inflating_max_bytes = Row[int](ConfigType.LONG, None, low=1 << 18, ours=True).means(
        "Bytes of kept.inflight.max.bytes that threads may hold inflated batches in; further "
        "batches wait their turn, and one that needs more is alone. Default: a quarter of it."
    )
    waiting_max_bytes = Row[int](ConfigType.LONG, None, low=1 << 18, ours=True).means(
        "Bytes that requests hold which wait for replicas, an fsync or other nodes, 1 KB each and "
        "128 to 512 bytes for each of their entries; one address may hold a quarter of it. Above, "
        "what comes behind such a request, and requests of more than 512 bytes, are not read. For "
        "fetches there is kept.fetch.sessions.max.partitions. Default: a quarter of "
        "kept.inflight.max.bytes."
    )
    responses_max_bytes = Row[int](ConfigType.LONG, None, low=1 << 18, ours=True).means(
        "Bytes that responses of many items hold while they are made, with their decoded requests: "
        "512 for each item, and what is encoded. Above, their making waits, but for one. Default: "
        "a quarter of kept.inflight.max.bytes."
    )
    connection_inflight_max_bytes = _integer("16777216", low=1024, ours=True).means(
        "Bytes of responses that one connection's client has not taken, or that are made and wait "
        "for one before them; its next requests wait above."
    )
    connection_inflight_max_requests = _integer("1000", low=1, ours=True).means(
        "Unanswered requests of one connection; the next ones wait."
    )
    request_max_entries = _integer("25000", low=100, ours=True).means(
        "Entries of one request: elements of its arrays, on all levels, and tagged fields. A "
        "request with more is refused before it is decoded. A consumer of 10,000 partitions, each "
        "of a topic of its own, sends 20,001."
    )
    request_decoded_max_bytes = _integer("16777216", low=65536, ours=True).means(
        "Bytes of one request that are decoded: all of it, but for the record batches of a "
        "Produce. A larger one is refused."
    )
    auto_create_max_topics = _integer("100", low=1, ours=True).means(
        "Topics that one Metadata request creates where auto.create.topics.enable is on; for the "
        "others it says LEADER_NOT_AVAILABLE, after which clients ask again. Each is an entry of "
        "the metadata log, made one after the other."
    )
    request_receive_ms = _long("60000", low=100, ours=True).means(
        "A connection whose request does not come in whole within this is closed: its client has "
        "given up (request.timeout.ms is 30 s), and its bytes are reserved meanwhile. A gRPC call "
        "whose request does not come within this is ended."
    )
    silent_ms = _long("10000", low=100, ours=True).means(
        "A connection whose first four bytes do not come within this is closed: every client of "
        "this port speaks first. What comes later is connections.max.idle.ms's. So long a gRPC "
        "call without a login may leave its request open, where others log in."
    )
    silent_max_connections = _integer("4096", low=1, ours=True).means(
        "Connections of one listener that have not sent four bytes yet; beyond, the oldest is "
        "closed."
    )
    node_max_connections = _integer("1024", low=16, ours=True).means(
        "Connections at a time on the listener between nodes. Clients' are not counted with them, "
        "and so keep no node from the others; for one more an idle one is closed, if there is any."
    )
    inflated_max_bytes = _integer("268435456", low=1 << 16, high=MAX_INT32, ours=True).means(
        "Largest size of one batch after decompression; more is refused as a bomb."
    )
    http_request_max_bytes = _integer("1048576", low=1024, high=1 << 28, ours=True).means(
        "Largest HTTP request, headers (64 KiB at most) and body."
    )
    http_idle_ms = _long("30000", low=100, ours=True).means(
        "An HTTP connection that sends no whole request for so long is closed."
    )
    http_max_connections = _integer("256", low=1, ours=True).means(
        "HTTP connections at a time. If all are taken, a new one replaces another: one that waits "
        "for a request or for a login (of an address that has more than its share, which is a "
        "quarter, or less where there are more addresses; else the one that waited longest), else "
        "the newest of an address that has more than its share. Requests whose login was accepted "
        "are replaced only where they hold more than three quarters: the newest of the user who "
        "has most, if he has more than a quarter (never, if there are fewer than four places). If "
        "none can be replaced, the new one gets 503. Addresses of one IPv6 /64 count as one; "
        "among them one that has more gives way to one that has fewer. /healthz and /readyz are "
        "served beyond this limit."
    )
    http_hosts = _listing("", ours=True).means(
        "Host names, beyond localhost, this machine's and the listeners' own, that may appear in "
        "the Host header of HTTP requests (/healthz and /readyz take any; addresses always pass)."
    )
    console_actions = _boolean("false", ours=True).means(
        "Whether the console's buttons work. Without it a POST that a browser sends is refused; so "
        "is creating, altering, deleting and producing through /api/v1, whoever sends it. Commands "
        "and Kafka's clients are not concerned."
    )
    console_max_streams = _integer("16", low=0, ours=True).means(
        "Pages of the console that are told at once what moves; the others ask from time to time."
    )
    grpc_max_connections = _integer("256", low=1, ours=True).means(
        "gRPC connections at a time. If all are taken, a new one replaces another. Where "
        "anybody logs in: one without a login or without a call, else, where those with both "
        "hold more than three quarters, the newest of the user who has most, if he has more "
        "than a quarter. Elsewhere: one without a call, or of an address that has more than its "
        "share (a quarter, or less where there are more addresses). If none can be replaced, "
        "the new one is closed."
    )
    grpc_max_requests = _integer("256", low=1, ours=True).means(
        "gRPC calls at a time, streams included. If all are taken, a new one replaces another. "
        "Where anybody logs in: one without a login, else, where those with one hold more than "
        "three quarters, the newest of the user who has most, if he has more than a quarter. "
        "Elsewhere: one of an address that has more than its share. In both cases also one "
        "whose request has not come, or whose response is not taken for a second. If none can "
        "be replaced, the new one is answered RESOURCE_EXHAUSTED. Each call holds a Kafka "
        "connection to a leader and what it reads ahead, about a megabyte."
    )
    grpc_request_max_bytes = _integer("4194304", low=1024, high=1 << 30, ours=True).means(
        "Largest message of a gRPC client."
    )

    # TLS. All of them can be set for one listener, as listener.name.<name>.ssl.keystore.location.

    ssl_keystore_location = _string(None).means(
        "PEM file with a listener's private key (PKCS#8, encrypted or not) and its certificate, "
        "followed by those that signed it. The node's own connections to others use it, too."
    )
    ssl_keystore_key = _secret(None).means(
        "The private key as PEM text, instead of ssl.keystore.location."
    )
    ssl_keystore_certificate_chain = _secret(None).means(
        "The certificate and those that signed it as PEM text, with ssl.keystore.key."
    )
    ssl_key_password = _secret(None).means("Password of the private key, where it is encrypted.")
    ssl_keystore_type = _string("PEM").means(
        "PEM. JKS and PKCS12 are refused with the command that converts them."
    )
    ssl_keystore_password = _secret(None).means("Not to be set: PEM has no password of the store.")
    ssl_truststore_location = _string(None).means(
        "PEM file with the certificates that sign those of clients and of other nodes."
    )
    ssl_truststore_certificates = _secret(None).means(
        "The same as PEM text, instead of ssl.truststore.location."
    )
    ssl_truststore_type = _string("PEM").means("PEM, as ssl.keystore.type.")
    ssl_truststore_password = _secret(None).means(
        "Not to be set: PEM has no password of the store."
    )
    ssl_protocol = _string("TLSv1.3").means("Newest version of TLS that is spoken.")
    ssl_enabled_protocols = _listing("TLSv1.2,TLSv1.3").means(
        "Versions of TLS that are spoken, up to ssl.protocol. There are no others."
    )
    ssl_cipher_suites = _listing("").means(
        "Cipher suites by their IANA names. Empty: those with forward secrecy and authenticated "
        "encryption. The suites of TLS 1.3 cannot be chosen among: all of them, or none with "
        "TLSv1.2 alone."
    )
    ssl_endpoint_identification_algorithm = _string("https").means(
        "https: other nodes' certificates must name the host that is connected to. Empty: they "
        "need not."
    )
    ssl_client_auth = _string("none", choices=("none", "requested", "required")).means(
        "Whether clients show a certificate. requested: a valid one says who the client is, and "
        "one without is anonymous."
    )

    # SASL. All of them can be set for one listener, too.

    sasl_enabled_mechanisms = _listing("").means(
        "How clients of SASL listeners may say who they are: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, "
        "OAUTHBEARER. (Kafka's default is GSSAPI, which is not served.)"
    )
    plain_sasl_jaas_config = _secret(None).means(
        "Users of PLAIN with their passwords: org.apache.kafka.common.security.plain."
        'PlainLoginModule required user_ada="password" user_bob="another";'
    )
    sasl_plain_users = _string("jaas", choices=("jaas", "scram"), ours=True).means(
        "Who may log in by PLAIN besides users in plain.sasl.jaas.config. scram: whoever has SCRAM "
        "credentials (kept user add), by the same password, so that none lies in a file."
    )
    sasl_oauthbearer_jwks_endpoint_url = _string(None).means(
        "Where the keys are by which access tokens are believed, the issuer's JSON Web Key Set: an "
        "https:// address, or a file:/// URL. For the mechanism OAUTHBEARER, with the extra oauth."
    )
    sasl_oauthbearer_truststore_location = _string(None, ours=True).means(
        "A PEM file of the authorities that may sign the certificate of that https:// address. "
        "Without it those that the system trusts."
    )
    sasl_oauthbearer_jwks_endpoint_refresh_ms = _long("3600000", low=1000).means(
        "How often the keys are fetched, or read, again. A token that names a key that is not "
        "among them has that done at once, every 10 s at most. Keys are used until others come."
    )
    sasl_oauthbearer_jwks_endpoint_retry_backoff_ms = _long("100", low=10).means(
        "How long it waits after a first failure; twice as long after each further one."
    )
    sasl_oauthbearer_jwks_endpoint_retry_backoff_max_ms = _long("10000", low=10).means(
        "How long it waits between failures at most."
    )
    sasl_oauthbearer_expected_audience = _listing("").means(
        "Tokens must be for one of these audiences (aud). Empty: any."
    )
    sasl_oauthbearer_expected_issuer = _string(None, check=check_not_blank).means(
        "Tokens must be of this issuer (iss), letter by letter. Without it any whose keys these "
        "are."
    )
    sasl_oauthbearer_clock_skew_seconds = _integer("30", low=0, high=3600).means(
        "How far the clocks of an issuer and of this node may be apart, where a token's times are "
        "looked at."
    )
    sasl_oauthbearer_sub_claim_name = _string("sub", check=check_not_blank).means(
        "The claim of a token that names its user: User:NAME is who logs in."
    )
    sasl_oauthbearer_scope_claim_name = _string("scope", check=check_not_blank).means(
        "The claim with a token's scopes. It must be a text or a list of them where it is there; "
        "what may be done is said by ACLs, as in Kafka."
    )
    sasl_server_max_receive_size = _integer("524288", low=1024).means(
        "Largest request of a client that has not logged in yet. Beyond 16 KiB it draws on what "
        "all such clients share: a sixteenth of kept.inflight.max.bytes, besides, and those of one "
        "address a quarter of that. Who finds it used up is closed."
    )
    connections_max_reauth_ms = _long("0", low=0).means(
        "Longest time that a login counts: a client must log in again on the same connection "
        "before (KIP-368), or it is closed at its next request. 0: as long as the connection."
    )
    connection_failed_authentication_delay_ms = _integer("100", low=0, high=5000).means(
        "How long the answer to a failed login waits. Each further failure of an address within "
        "10 s doubles that, up to 5 s."
    )
    ssl_principal_mapping_rules = _string("DEFAULT").means(
        "Who a client is by the distinguished name of its certificate: DEFAULT takes it whole, "
        "RULE:pattern/replacement/ what the replacement makes of it, in lower case with L behind "
        "it, in upper case with U; the first rule that takes the whole name counts, and without "
        "one the client is turned away."
    )
    ssl_allow_dn_changes = _boolean("false").means(
        "Whether a certificate may be replaced, while the node runs, by one for another subject."
    )
    ssl_allow_san_changes = _boolean("false").means(
        "Whether it may be replaced by one that lacks some of its names."
    )
    tls_reload_ms = _long("10000", low=100, ours=True).means(
        "How often the files of TLS are read again. What two reads in a row found, and is whole, "
        "is what new connections have: new certificates need no restart."
    )
    tls_handshakes = _integer("256", low=1, ours=True).means(
        "TLS handshakes at a time, of each listener by itself: a handshake counts once the "
        "client's first message is there whole. If there are more, the oldest is closed. A "
        "handshake has kept.silent.ms, and so have that first message and what comes after the "
        "handshake."
    )

    # Consumer groups.

    group_min_session_timeout_ms = _integer("6000", low=1).means(
        "Shortest session timeout of a group's member."
    )
    group_max_session_timeout_ms = _integer("1800000", low=1).means(
        "Longest session timeout of a group's member."
    )
    group_initial_rebalance_delay_ms = _integer("3000", low=0).means(
        "How long an empty group waits for more members before its first rebalance. A cluster of "
        "one uses 0 unless set."
    )
    group_max_size = _integer("2000", low=1).means(
        "Members of a group, at most. A group forms its generation, and takes its assignment, at a "
        "stretch, some 10 us a member, in which nobody else is served; a record of 1 MiB holds "
        "some 3,500. Kafka has no limit unless it is set."
    )
    group_max_bytes = _integer("16777216", low=1 << 16, ours=True).means(
        "Memory of one group's members: ids, subscriptions, assignments. Whoever would join above "
        "gets GROUP_MAX_SIZE_REACHED. (A group of which more than message.max.bytes is assigned "
        "cannot be stored anyway.)"
    )
    groups_max_bytes = _long("536870912", low=1 << 20, ours=True).means(
        "Memory of all groups that this node coordinates, offsets included (about 0.5 KB each). "
        "Above, nobody new may join, and offsets of further partitions are refused; members stay, "
        "and what was committed before may be committed anew. Records that wait for replicas count "
        "(about 1 KB an offset), and may take an eighth more; beyond, COORDINATOR_NOT_AVAILABLE."
    )
    offsets_topic_num_partitions = _integer("50", low=1).means(
        "Partitions of __consumer_offsets; fixed once it exists."
    )
    offsets_topic_replication_factor = _short("3", low=1).means(
        "Replicas of __consumer_offsets; no more than there are brokers."
    )
    offsets_topic_segment_bytes = _integer("104857600", low=1024).means(
        "Segment size of __consumer_offsets."
    )
    offset_metadata_max_bytes = _integer("4096", low=0).means(
        "Longest metadata text of a committed offset."
    )
    offsets_retention_minutes = _integer("10080", low=1).means(
        "How long offsets of an empty group are kept."
    )
    offsets_retention_check_interval_ms = _long("600000", low=1).means(
        "How often offsets are checked for their age."
    )
    offsets_commit_timeout_ms = _integer("5000", low=1).means(
        "How long a commit waits for the replicas."
    )

    # Transactions.

    transaction_max_timeout_ms = _integer("900000", low=1).means(
        "Longest transaction.timeout.ms that a producer may ask for; with more it gets "
        "INVALID_TRANSACTION_TIMEOUT."
    )
    transaction_abort_timed_out_transaction_cleanup_interval_ms = _integer("10000", low=1).means(
        "How often transactions are aborted that are open for longer than their timeout."
    )
    transactional_id_expiration_ms = _integer("604800000", low=1).means(
        "How long a transactional id is remembered after its last transaction."
    )
    transaction_remove_expired_transaction_cleanup_interval_ms = _integer("3600000", low=1).means(
        "How often transactional ids are checked for that."
    )
    transaction_partition_verification_enable = _boolean("true", dynamic=True).means(
        "Whether a leader asks the coordinator before a partition's first batch of a transaction, "
        "for producers whose epoch does not grow with each transaction. Without it a late batch "
        "may open a transaction that nobody ends."
    )
    add_partitions_to_txn_retry_backoff_max_ms = _integer("100", low=0).means(
        "How long a partition that joins a transaction waits for the end of the one before."
    )
    transaction_stale_connections = _string("close", choices=("close", "serve"), ours=True).means(
        "What happens to requests of a transaction over a connection that its producer has "
        "replaced by a newer one: such a request was given up, and would act on a later "
        "transaction. serve: for proxies that spread a producer's requests over connections."
    )
    transactional_ids_max_bytes = _long("536870912", low=1 << 20, ours=True).means(
        "Memory of all transactional ids that this node coordinates (about 0.3 KB each, and their "
        "text twice: some 1.2 million by default; 0.45 KB more, and 128 bytes for each partition, "
        "while a transaction has partitions). "
        "Above, new ids get COORDINATOR_NOT_AVAILABLE; partitions of those that exist may take an "
        "eighth more."
    )
    transaction_state_log_num_partitions = _integer("50", low=1).means(
        "Partitions of __transaction_state; fixed once it exists."
    )
    transaction_state_log_replication_factor = _short("3", low=1).means(
        "Replicas of __transaction_state; no more than there are brokers."
    )
    transaction_state_log_min_isr = _integer("2", low=1).means(
        "min.insync.replicas of __transaction_state; capped by its replicas."
    )
    transaction_state_log_segment_bytes = _integer("104857600", low=1024).means(
        "Segment size of __transaction_state."
    )

    # The first users.

    bootstrap_scram = _secret(None, check=parse_bootstrap_scram, ours=True).means(
        "Users that a new cluster begins with; the same on every voter. kept serve --add-scram "
        "says the same: SCRAM-SHA-512=[name=admin,password-file=/run/secrets/admin], several with "
        "; between them. A cluster that exists ignores it."
    )

    # Who may do what.

    authorizer_class_name = _string("", check=check_authorizer_class).means(
        "What decides who may do what: empty, whoever got in may do everything; "
        "org.apache.kafka.metadata.authorizer.StandardAuthorizer, the ACLs of the metadata log."
    )
    super_users = _string("", check=check_super_users).means(
        "Principals that may do everything, with ; between them: User:admin;User:CN=ops,O=x."
    )
    allow_everyone_if_no_acl_found = _boolean("false").means(
        "Whether everybody may use a resource that no ACL names."
    )
    node_network_trusted = _boolean("false", ours=True).means(
        "Whether nobody but nodes of the cluster reaches the listener between nodes, so that it "
        "may be PLAINTEXT beside an authorizer."
    )
    audit = _string("denied", choices=("off", "denied", "all"), ours=True).means(
        "What the audit log records where there is an authorizer: what was denied, logins that "
        "were refused, and changes; all: also what was allowed."
    )
    audit_path = _string(None, check=check_not_blank, ours=True).means(
        "File of the audit log, readable by its owner only; opened anew on SIGHUP. Default: "
        "standard error."
    )

    # What the node says of itself.

    log_format = _string("text", choices=("text", "json"), ours=True).means(
        "How the node's own log lines look: key=value text, or one JSON object a line."
    )
    log_level = _string("info", choices=("debug", "info", "warning", "error"), ours=True).means(
        "Which of its log lines the node writes."
    )
    metrics_partitions = _string("some", choices=("some", "all"), ours=True).means(
        "Series per partition: some = above the dirty target, uncleanable, under-replicated or "
        "offline; all = every one."
    )


class TopicOnly:
    """Settings that a topic has and a node gives no default for."""

    follower_replication_throttled_replicas = _listing("", check=check_throttled).means(
        "Replicas whose replication is throttled at the follower, as partition:broker, or '*'."
    )
    leader_replication_throttled_replicas = _listing("", check=check_throttled).means(
        "Replicas whose replication is throttled at the leader, as partition:broker, or '*'."
    )
    remote_log_copy_disable = _boolean("false", no_effect=_NO_LOCAL_PART).means(
        "Whether a tiered topic stops copying segments away."
    )
    remote_log_delete_on_disable = _boolean("false", no_effect=_NO_LOCAL_PART).means(
        "Whether remote segments are deleted when tiering is turned off."
    )
    remote_storage_enable = _boolean(
        "false",
        refused="Tiered Storage functionality is disabled in the broker. "
        "Topic cannot be configured with remote log storage.",
    ).means("Tiered storage for this topic.")
    compaction_strategy = _string("latest", check=check_strategy_name, ours=True).means(
        "Which records of a key survive compaction: latest, latest-n (kept.compaction.latest.n), "
        "highest-version (kept.compaction.version.header, else the timestamp), by-key-prefix "
        "(kept.compaction.prefixes), or the name of an entry point in the group "
        "kept.compaction.strategies."
    )
    compaction_latest_n = _integer(None, low=1, high=10000, ours=True).means(
        "Records kept of each key by the strategy latest-n."
    )
    compaction_version_header = _string(None, check=check_not_blank, ours=True).means(
        "Header that holds a record's version for the strategy highest-version."
    )
    compaction_prefixes = _string(None, check=parse_prefixes, ours=True).means(
        "Strategy by prefix of the key, the longest match wins, for the strategy by-key-prefix: "
        "user.=latest-n:3,cfg.=latest. Keys without a match keep their latest record."
    )


NODE_ROWS: Final = {field: row for field, row in vars(NodeSettings).items() if isinstance(row, Row)}
"""The rows of nodes by field, in the order of the documentation."""

HONOURED: Final = Settings("broker", [row.of_node(field) for field, row in NODE_ROWS.items()])
"""Every setting of a node that has an effect."""

BROKER_SETTINGS: Final = Settings("broker", [*HONOURED.values(), *UNSUPPORTED])
"""Every broker setting by name: honoured, accepted without effect, or refused with the reason."""

TOPIC_SETTINGS: Final = Settings(
    "topic",
    [
        *(row.of_topic(field) for field, row in NODE_ROWS.items() if row.topic),
        *(row.of_topic(field) for field, row in vars(TopicOnly).items() if isinstance(row, Row)),
    ],
)
"""Every topic setting by name: Apache Kafka 4.3's 33 public ones, and those that are ours."""
