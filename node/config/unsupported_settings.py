"""Kafka's broker settings that kept knows but does not honour.

Most are accepted without effect, each with the reason, so that a ``server.properties`` can be taken
over; DescribeConfigs and ``docs/configuration.md`` say so. Where ignoring a setting would be
dangerous (security, plug-in classes) any value but the default is refused.
"""

from __future__ import annotations

from typing import Final

from kept.node.config.config_def import ConfigDef, ConfigType

_NO_CLASSES: Final = "kept runs no Java classes"
NO_TIERS: Final = "kept has no tiered storage"
_NO_SHARES: Final = "kept has no share or streams groups"

REFUSED_PREFIXES: Final = {
    "sasl.kerberos.": "GSSAPI needs a KDC, a keytab and a C library on every node",
    "sasl.oauthbearer.": "it is for who gets a token, as no node does, or a class that checks one",
    "sasl.": "clients' listeners have sasl.enabled.mechanisms and <mechanism>.sasl.jaas.config, "
    "and nodes know each other by certificates",
    "remote.": NO_TIERS,
    "follower.fetch.last.tiered.": NO_TIERS,
    "group.share.": _NO_SHARES,
    "share.": _NO_SHARES,
    "group.streams.": _NO_SHARES,
}
"""Families of Kafka settings that are refused, with the reason."""


def _accepted(why: str, *rows: tuple[str, str, str | None, str]) -> list[ConfigDef]:
    """Settings from rows of (name, type, default, range as "low:high" and letters for updates)."""
    accepted = []
    for name, kind, default, rest in rows:
        bounds, _, update = rest.partition(" ")
        low, _, high = bounds.partition(":")
        accepted.append(
            ConfigDef(
                name,
                ConfigType[kind.upper()],
                default,
                f"Kafka's {name}.",
                low=float(low) if low else None,
                high=float(high) if high else None,
                dynamic=update == "dynamic",
                no_effect=why,
            )
        )
    return accepted


def _refused(why: str, *rows: tuple[str, str, str | None]) -> list[ConfigDef]:
    return [
        ConfigDef(
            name,
            ConfigType[kind.upper()],
            default,
            f"Kafka's {name}.",
            dynamic=False,
            refused=f"{why}; only the default is accepted",
        )
        for name, kind, default in rows
    ]


UNSUPPORTED: Final = (
    *_accepted(
        "the system sizes socket buffers by itself.",
        ("socket.send.buffer.bytes", "int", "102400", ""),
        ("socket.receive.buffer.bytes", "int", "102400", ""),
    ),
    *_accepted(
        "kept.inflight.max.bytes limits requests and responses in memory together.",
        ("queued.max.request.bytes", "long", "-1", ""),
    ),
    *_accepted(
        "one thread serves the network and the log; many cores: several nodes.",
        ("background.threads", "int", "10", "1: dynamic"),
        ("num.network.threads", "int", "3", "1: dynamic"),
        ("num.io.threads", "int", "8", "1: dynamic"),
        ("num.recovery.threads.per.data.dir", "int", "2", "1: dynamic"),
        ("num.replica.alter.log.dirs.threads", "int", None, ""),
        ("group.coordinator.threads", "int", "4", "1:"),
        ("group.coordinator.background.threads", "int", "2", "1:"),
        ("queued.max.requests", "int", "500", "1:"),
    ),
    *_accepted(
        "kept does this another way and waits as long as other settings say.",
        ("replica.socket.receive.buffer.bytes", "int", "65536", ""),
        ("controller.socket.timeout.ms", "int", "30000", ""),
        ("socket.connection.setup.timeout.max.ms", "long", "30000", ""),
        ("request.timeout.ms", "int", "30000", ""),
    ),
    *_accepted(
        "kept moves no replica between the directories of one node.",
        (
            "replica.alter.log.dirs.io.max.bytes.per.second",
            "long",
            "9223372036854775807",
            "0: dynamic",
        ),
    ),
    *_accepted(
        "the metadata log is kept's own Raft: its leader sends, and entries go out at once.",
        ("controller.quorum.election.backoff.max.ms", "int", "1000", "0:"),
        ("controller.quorum.append.linger.ms", "int", "25", "0:"),
        ("controller.quorum.retry.backoff.ms", "int", "20", "0:"),
        ("controller.quorum.fetch.max.bytes", "int", "1048576", "1:"),
        ("controller.quorum.fetch.snapshot.max.bytes", "int", "1048576", "1:"),
    ),
    *_accepted(
        "voters come from controller.quorum.voters, then from the metadata log; kept cluster voter "
        "adds one.",
        ("controller.quorum.bootstrap.servers", "list", "", ""),
        ("controller.quorum.auto.join.enable", "boolean", "false", ""),
    ),
    *_accepted(
        "kept's metadata log is small and takes its snapshots by itself.",
        ("metadata.log.segment.bytes", "int", "1073741824", "8388608:"),
        ("metadata.log.segment.ms", "long", "604800000", ""),
        ("metadata.max.retention.bytes", "long", "104857600", ""),
        ("metadata.max.retention.ms", "long", "604800000", ""),
        ("metadata.max.idle.interval.ms", "int", "500", "0:"),
        ("metadata.log.max.snapshot.interval.ms", "long", "3600000", "0:"),
    ),
    *_accepted(
        "groups use the classic protocol; consumer, share and streams groups are not served yet.",
        ("group.consumer.assignment.interval.ms", "int", "1000", "0: dynamic"),
        ("group.consumer.assignors", "list", "uniform,range", ""),
        ("group.consumer.heartbeat.interval.ms", "int", "5000", "1:"),
        ("group.consumer.max.assignment.interval.ms", "int", "15000", "0:"),
        ("group.consumer.max.heartbeat.interval.ms", "int", "15000", "1:"),
        ("group.consumer.max.session.timeout.ms", "int", "60000", "1:"),
        ("group.consumer.max.size", "int", "2147483647", "1:"),
        ("group.consumer.migration.policy", "string", "bidirectional", ""),
        ("group.consumer.min.assignment.interval.ms", "int", "0", "0:"),
        ("group.consumer.min.heartbeat.interval.ms", "int", "5000", "1:"),
        ("group.consumer.min.session.timeout.ms", "int", "45000", "1:"),
        ("group.consumer.session.timeout.ms", "int", "45000", "1:"),
        ("group.coordinator.append.linger.ms", "int", "-1", "-1:"),
        ("group.coordinator.cached.buffer.max.bytes", "int", "1048588", "524288: dynamic"),
        ("group.coordinator.rebalance.protocols", "list", "classic,consumer,streams", ""),
    ),
    *_accepted(
        "kept does this another way and needs no number for it.",
        ("log.cleaner.io.buffer.size", "int", "524288", "0: dynamic"),
        ("offsets.load.buffer.size", "int", "5242880", "1:"),
        ("transaction.state.log.load.buffer.size", "int", "5242880", "1:"),
        ("add.partitions.to.txn.retry.backoff.ms", "int", "20", "1:"),
        ("offsets.topic.compression.codec", "int", "0", ""),
        ("fetch.purgatory.purge.interval.requests", "int", "1000", ""),
        ("producer.purgatory.purge.interval.requests", "int", "1000", ""),
        ("delete.records.purgatory.purge.interval.requests", "int", "1", ""),
        ("log.dir.failure.timeout.ms", "long", "30000", "1:"),
        ("cordoned.log.dirs", "list", "", ""),
        ("early.start.listeners", "list", None, ""),
        ("max.connections.per.ip.overrides", "string", "", " dynamic"),
    ),
    *_accepted(
        "moving replicas between log directories is not throttled.",
        ("replication.quota.window.num", "int", "11", "1:"),
        ("replication.quota.window.size.seconds", "int", "1", "1:"),
        ("alter.log.dirs.replication.quota.window.num", "int", "11", "1:"),
        ("alter.log.dirs.replication.quota.window.size.seconds", "int", "1", "1:"),
    ),
    *_accepted(
        "metrics are served at /metrics.",
        ("metric.reporters", "list", "org.apache.kafka.common.metrics.JmxReporter", " dynamic"),
        ("metrics.num.samples", "int", "2", "1:"),
        ("metrics.sample.window.ms", "long", "30000", "1:"),
        ("metrics.recording.level", "string", "INFO", ""),
        ("kafka.metrics.reporters", "list", "", ""),
        ("kafka.metrics.polling.interval.secs", "int", "10", "1:"),
        ("telemetry.max.bytes", "int", "1048576", "1:"),
    ),
    *_accepted(
        "OpenSSL does what Java's providers do there.",
        ("ssl.keymanager.algorithm", "string", "SunX509", ""),
        ("ssl.trustmanager.algorithm", "string", "PKIX", ""),
        ("ssl.secure.random.implementation", "string", None, ""),
    ),
    *_accepted(
        "users of SCRAM are in the metadata log (kept user), and nodes do not log in by it.",
        ("scram-sha-256.sasl.jaas.config", "password", None, ""),
        ("scram-sha-512.sasl.jaas.config", "password", None, ""),
    ),
    *_accepted(
        "which tokens are believed is in sasl.oauthbearer.*.",
        ("oauthbearer.sasl.jaas.config", "password", None, ""),
    ),
    *_accepted(
        "kept has no delegation tokens.",
        ("delegation.token.expiry.time.ms", "long", "86400000", "1:"),
        ("delegation.token.max.lifetime.ms", "long", "604800000", "1:"),
        ("delegation.token.expiry.check.interval.ms", "long", "3600000", "1:"),
    ),
    *_refused(
        _NO_CLASSES,
        (
            "principal.builder.class",
            "class",
            "org.apache.kafka.common.security.authenticator.DefaultKafkaPrincipalBuilder",
        ),
        ("security.providers", "string", None),
    ),
    *_refused(
        "access tokens are always checked by their signature",
        (
            "oauthbearer.sasl.server.callback.handler.class",
            "class",
            "org.apache.kafka.common.security.oauthbearer.OAuthBearerValidatorCallbackHandler",
        ),
    ),
    *_refused(
        "kept has no delegation tokens",
        ("delegation.token.secret.key", "password", None),
    ),
    *_refused(
        "a transaction cannot be prepared for another system to commit yet (KIP-939)",
        ("transaction.two.phase.commit.enable", "boolean", "false"),
    ),
    *_refused(
        "inter.broker.listener.name names the listener between nodes, and "
        "listener.security.protocol.map its protocol",
        ("security.inter.broker.protocol", "string", "PLAINTEXT"),
    ),
    *_refused(
        _NO_CLASSES,
        ("ssl.provider", "string", None),
        ("ssl.engine.factory.class", "class", None),
        ("create.topic.policy.class.name", "class", None),
        ("alter.config.policy.class.name", "class", None),
        ("client.quota.callback.class", "class", None),
        ("config.providers", "list", ""),
    ),
)
"""Settings of the broker that change nothing here."""
