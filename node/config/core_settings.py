"""Settings of the cores of the cluster, from the node's settings.

Only the names differ: the cores count ticks and know nothing of Kafka's property names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kept.cluster.controller.broker_lifecycle import LifecycleSettings
from kept.cluster.controller.broker_sessions import SessionSettings
from kept.cluster.raft.ready import RaftSettings

if TYPE_CHECKING:
    from kept.node.config.node_config import NodeConfig

TICK_MS: Final = 50
"""How often the metadata's Raft is given the time."""


def raft_settings(config: NodeConfig) -> RaftSettings:
    """Timers of the metadata log, in ticks of :data:`TICK_MS`."""
    patience = max(2, config.controller_quorum_fetch_timeout_ms // TICK_MS)
    return RaftSettings(
        election_ticks=patience,
        candidate_ticks=max(2, config.controller_quorum_election_timeout_ms // TICK_MS),
        heartbeat_ticks=max(1, min(2, patience // 5)),
    )


def session_settings(config: NodeConfig) -> SessionSettings:
    """How the active controller judges brokers."""
    return SessionSettings(
        session_timeout_ms=config.broker_session_timeout_ms,
        heartbeat_interval_ms=config.broker_heartbeat_interval_ms,
        recovery_wait_ms=config.unclean_recovery_wait_ms,
        auto_leader_rebalance=config.auto_leader_rebalance_enable,
        imbalance_check_ms=1000 * config.leader_imbalance_check_interval_seconds,
        unclean_default=config.unclean_leader_election_enable,
    )


def lifecycle_settings(config: NodeConfig) -> LifecycleSettings:
    """How a broker keeps in touch with the controller, and when it leaves."""
    return LifecycleSettings(
        heartbeat_interval_ms=config.broker_heartbeat_interval_ms,
        session_timeout_ms=config.broker_session_timeout_ms,
        stall_ms=config.stall_ms,
        answer_timeout_ms=config.controller_quorum_request_timeout_ms,
        shutdown_timeout_ms=(
            config.shutdown_timeout_ms if config.controlled_shutdown_enable else 0
        ),
    )
