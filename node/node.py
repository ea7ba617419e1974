"""The life of a node: what its parts do in which order, from start to stop.

One thread runs the network and the logs; what blocks (fsync, the metadata log, checks of large
batches, cold reads) runs in threads; cleaning in worker processes. The node acts on the image only
(rule 35): a proposal is durable first, then applied here, then its future is done. Start: take the
addresses, lock the directories, replay the metadata, open the logs, lead, accept, print the ready
line. Stop (TERM, INT): the reverse; checkpoints before the mark of a clean stop.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from kept.cluster.controller.brokers import RegisterRequest
from kept.cluster.controller.features import SUPPORTED
from kept.cluster.metadata.records import ResourceType
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import NO_DIRECTORY
from kept.node.config import bootstrap_scram
from kept.node.config.core_settings import raft_settings
from kept.node.kafka import api
from kept.node.metadata import directory_ids
from kept.node.parts import NodeParts
from kept.node.runtime.ids import new_id
from kept.storage.directory import refuse_kafka

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Delta, Image
    from kept.node.config.node_config import NodeConfig
    from kept.node.kafka.listener import Listener
    from kept.node.runtime.runtime import Runtime


class Node:
    """One node. ``start`` and ``stop`` are called on its loop, in this order, once. ``runtime``:
    its surroundings, if they are not the process's own.
    """

    def __init__(self, config: NodeConfig, runtime: Runtime | None = None) -> None:
        self.parts = NodeParts(config, runtime)
        self._warming: asyncio.Task[None] | None = None

    @property
    def config(self) -> NodeConfig:
        """The settings in force."""
        return self.parts.live_config.current

    async def start(self) -> None:
        """Open everything and accept clients. Raises KeptError; nothing is left locked then."""
        parts = self.parts
        parts.kernels.warn()
        parts.open_files.share()
        try:
            for listener in parts.all_listeners:
                listener.bind()
                parts.addresses.set_port(listener.name, listener.port)
            self._open_metadata()
            parts.tls_reload.start()
            parts.logins.tokens.start()
            if parts.node_listener is not None:
                await self._meet(parts.node_listener)
            parts.identity.cluster_id = parts.metadata.image.cluster_id or ""
            self._reload_settings(parts.metadata.image)
            parts.log_dirs.open()
            if self.config.alone:
                parts.cluster_link.register_alone(self._registration())
                await parts.replicas.mark_running(parts.identity.broker_epoch)
                parts.roles.serving = True
            self._use_quotas(parts.metadata.image)
            await parts.replicas.start(parts.metadata.begin())
            parts.metadata.act(self._act_on)
            parts.groups.shards.start()
            parts.transactions.start()
            if not self.config.alone and self.config.is_broker:
                await parts.cluster_link.register(self._registration())
            for listener in parts.listeners:
                await listener.start()
            parts.maintenance.start()
            parts.readiness.started = True
            parts.readiness.changed()
            self._warming = parts.runtime.loop.create_task(self._warm_up())
        except BaseException:
            parts.maintenance.stop()
            await parts.tls_reload.stop()
            parts.logins.tokens.stop()
            for listener in parts.all_listeners:
                listener.stop_accepting()
            await self._leave_cluster()
            await parts.replicas.log_lifecycle.stop()
            self._release()
            raise

    async def _meet(self, node_listener: Listener) -> None:
        """Speak with the other nodes until the cluster is known."""
        parts = self.parts
        parts.controller.start()
        await parts.cluster_link.start()
        await node_listener.start()
        parts.maintenance.start_job("idle connections")
        await parts.cluster_link.cluster_id()

    def _registration(self) -> RegisterRequest:
        parts, table = self.parts, self.parts.table
        return RegisterRequest(
            parts.identity.node_id,
            parts.incarnation,
            parts.addresses.registration(),
            self.config.broker_rack,
            parts.log_dirs.clean_epoch,
            tuple(d.directory.directory_id for d in table.directories if d.offline is None),
            SUPPORTED,
        )

    def _open_metadata(self) -> None:
        parts, config, disk = self.parts, self.config, self.parts.runtime.disk
        path = config.metadata_log_dir
        usable = parts.log_dirs.find_usable()
        refuse_kafka(disk, path)
        directory_ids.refuse_foreign(
            disk,
            path,
            usable,
            node_id=config.node_id,
            alone=len(config.controller_quorum_voters) <= 1,
        )
        parts.metadata_directory.acquire(path)
        parts.metadata.open(
            path,
            disk,
            node_id=config.node_id,
            directory_id=new_id(),
            voters=tuple(
                Voter(voter.node_id, NO_DIRECTORY, voter.host, voter.port)
                for voter in config.controller_quorum_voters
            ),
            observer="controller" not in config.process_roles,
            settings=raft_settings(config),
            snapshot_after_bytes=config.metadata_log_max_record_bytes_between_snapshots,
            found_with=partial(bootstrap_scram.founding_records, config.bootstrap_scram),
        )
        bootstrap_scram.warn(config.bootstrap_scram, founding=parts.metadata.raft_node.founding)

    async def _warm_up(self) -> None:
        """Import what is needed soon but not to be ready; then the cleaner looks for work."""
        parts = self.parts
        await parts.runtime.in_thread(api.preload)
        if not parts.shutdown.requested.is_set():
            parts.cleaner.started  # noqa: B018 - starts it
            parts.dirty_history.sampling.start()
            parts.activity_history.sampling.start()

    async def warmed_up(self) -> None:
        """Wait until nothing is left to import."""
        if self._warming is not None:
            await self._warming

    # What the metadata says.

    async def _act_on(self, image: Image, delta: Delta) -> None:
        """Become what one entry of the metadata log says."""
        parts = self.parts
        if any(kind == ResourceType.BROKER for kind, _ in delta.configs):
            self._reload_settings(image)
        if any(key not in image.credentials for key in delta.credentials):
            parts.end_revoked_sessions()
        if delta.quotas:
            self._use_quotas(image)
        parts.counters.cluster.acting_on(image, delta, parts.identity.node_id)
        parts.controller.warn_of_unclean_elections(image, delta)
        parts.marker_writer.metadata_changed(delta)
        await parts.replicas.apply(image, delta)
        parts.groups.metadata_changed(image, delta)
        parts.transactions.metadata_changed(image, delta)
        parts.cluster_link.acted_on(image)
        parts.readiness.changed()

    def _use_quotas(self, image: Image) -> None:
        self.parts.client_quotas.replace(image.quotas)
        self.parts.connection_rates.replace(image.quotas)

    def _reload_settings(self, image: Image) -> None:
        parts = self.parts
        parts.live_config.reload(
            image.config(ResourceType.BROKER, str(parts.identity.node_id)),
            image.config(ResourceType.BROKER, ""),
        )
        config = self.config
        parts.memory.in_flight.resize(config.inflight_max_bytes, config.inflight_max_bytes_per_ip)
        parts.memory.inflating.limit_bytes = config.inflating_max_bytes
        parts.replicas.settings.limit_replication()

    # The end.

    async def stop(self) -> None:
        """Stop cleanly; what is acknowledged is durable when this returns."""
        parts = self.parts
        parts.readiness.started = False
        parts.readiness.changed()
        if not parts.shutdown.failure:
            await parts.cluster_link.leave()
        parts.maintenance.stop()
        await parts.tls_reload.stop()
        parts.logins.tokens.stop()
        for listener in parts.all_listeners:
            listener.stop_accepting()
        if self._warming is not None:
            await self._warming
        await parts.grpc.stop()
        await parts.dirty_history.sampling.stop()
        await parts.activity_history.sampling.stop()
        await parts.cleaner.stop(parts.replicas.close_manifests)
        await parts.verifier.close()
        await parts.transactions.stop()
        await parts.groups.shards.stop()
        # A lone node's decision ends first; others ask the next controller.
        async with parts.controller.turn if self.config.alone else nullcontext():
            for listener in parts.all_listeners:
                listener.close_connections()
            await self._leave_cluster()
            await parts.replicas.log_lifecycle.stop()
            for replica in parts.table.replicas.values():
                replica.partition.resign()
            await parts.log_dirs.close()
        await parts.audit.close()
        self._release()

    async def _leave_cluster(self) -> None:
        """Speak with nobody any more; nothing is decided or learnt after this."""
        parts = self.parts
        await parts.cluster_link.close_lifecycle()
        await parts.alter_partition.close()
        await parts.barrier.close()
        await parts.fetchers.stop()
        await parts.replicator.stop()
        await parts.notifier.stop()
        await parts.controller.close()
        await parts.cluster_link.stop()
        await parts.metadata.close()

    def _release(self) -> None:
        parts = self.parts
        parts.log_dirs.release()
        parts.metadata_directory.release()
        parts.logins.passwords.close()
        parts.runtime.close()
