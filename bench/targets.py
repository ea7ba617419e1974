"""What each figure of ours should be at most."""

from __future__ import annotations

KAFKA = "Kafka's"
"""The goal is what Apache Kafka needs in the same run."""

GOALS: dict[tuple[str, str], float | str] = {
    ("that look, of produce 1 KiB", "ratio"): 0.02,
    ("ready", "s"): 0.5,
    ("resident, idle", "MB"): 60,
    ("produce 1 KiB, acks=1", "us/request"): 8,
    ("produce 16 KiB, acks=1", "CPU-s/GB"): 1.0,
    ("produce 64 KiB, acks=1", "CPU-s/GB"): 0.6,
    ("produce 1023 KiB, acks=1", "CPU-s/GB"): 0.45,
    ("fetch 1024 KiB", "CPU-s/GB"): KAFKA,
    ("latency p50, 500/s", "ms"): 0.15,
    ("cleaner, all dirty", "CPU-s/GB"): 1.3,
    ("cleaner, half clean", "CPU-s/GB"): 1.3,
    ("p99 during / without", "ratio"): 1.5,
    ("applying a generation, CPU of its pass", "ratio"): 0.34,
    ("the same, segments end elsewhere", "ratio"): 0.34,
    ("three nodes ready", "s"): 1.5,
    ("acks=all 16 KiB, 1 conn.", "CPU-s/GB"): 3.5,
    ("acks=all 16 KiB, 4 conn.", "CPU-s/GB"): 3.5,
    ("acks=all 16 KiB, 16 conn.", "CPU-s/GB"): 3.5,
    ("acks=all 64 KiB, 1 conn.", "CPU-s/GB"): KAFKA,
    ("acks=all 1 MB, 1 conn.", "CPU-s/GB"): KAFKA,
    ("acks=all latency p50, 500/s", "ms"): 0.4,
    ("acks=all latency p99, 500/s", "ms"): 1.5,
    ("acks=all latency p999, 500/s", "ms"): KAFKA,
    ("memory of a node of three, loaded, RSS", "MB"): KAFKA,
    ("kill -9 of the leader: no acknowledgement, median", "s"): 1.0,
    ("kill -9 of the leader: no acknowledgement, p95", "s"): 2.0,
    ("kill -9 of the leader: new leader accepts, median", "s"): 0.5,
    ("kill -9 of the controller: no acknowledgement, median", "s"): 1.0,
    ("kill -9 of both in one: no acknowledgement, median", "s"): 1.0,
    ("kill -9 of both in one: new leader accepts, median", "s"): 0.5,
    ("transaction, 1 partition, each", "ms"): 1.0,
    ("transaction, 1 partition, commit p50", "ms"): 0.8,
    ("transaction, 1 partition", "CPU-ms"): 1.0,
    ("transaction of three nodes, 1 partition, each", "ms"): 3.3,
    ("transaction of three nodes, 1 partition, commit p50", "ms"): 3.0,
    ("transaction of three nodes, 1 partition", "CPU-ms"): 3.0,
    ("memory of a known transactional id", "B"): 400,
    ("produce 16 KiB, TLS", "CPU-s/GB"): 1.6,
    ("fetch 1 MiB, TLS", "CPU-s/GB"): 0.9,
    ("fence, 100000 partitions", "CPU-ms"): 1000,
    ("memory of a node per idle partition", "KB"): 20,
    ("longest stall of a loop, 3000 partitions, idle", "ms"): 2,
    ("longest stall of a loop, 3000 partitions, 50/s", "ms"): 2,
}


def goal_of(name: str, unit: str, theirs: float | None) -> float | None:
    """The figure that ours should not exceed; None when none is set, or Kafka's lacks."""
    goal = GOALS.get((name, unit))
    return theirs if goal == KAFKA else None if goal is None else float(goal)
