"""kept: a commit log that speaks Kafka and keeps the latest record of every key.

The folders beside this package are its parts: ``kept.storage`` (one partition on one disk),
``kept.compaction`` (what may be dropped, and dropping it), ``kept.replication`` (one partition's
leader and follower), ``kept.cluster`` (metadata and decisions), ``kept.client`` (reaching a
cluster) and ``kept.node`` (the process). ``docs/architecture.md`` says how they fit.
"""

__version__ = "0.1.0"
