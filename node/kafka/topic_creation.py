"""Topics that this node makes by itself: because a client named one, or for coordinators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.client.core.broker_errors import failure
from kept.client.protocol.api_keys import ApiKey
from kept.node.kafka.api import RequestContext
from kept.node.metadata import internal_topics
from kept.node.runtime import error_codes
from kept.node.security.session import node_session
from kept.storage.errors import (
    KeptError,
    PolicyViolation,
    ThrottlingQuotaExceeded,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.kafka.forwarding_manager import ForwardingManager
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.runtime.fd_quota import OpenFiles
    from kept.node.security.session import Session

CREATE_TOPICS_VERSION: Final = 7


@dataclass(frozen=True, slots=True)
class TopicCreation:
    """Has the active controller create topics."""

    config: LiveConfig
    metadata: MetadataLog
    forwarding: ForwardingManager
    open_files: OpenFiles

    async def create(
        self,
        name: str,
        *,
        num_partitions: int = -1,
        replication_factor: int = -1,
        configs: Mapping[str, str | None] | None = None,
        session: Session | None = None,
        client_id: str | None = None,
    ) -> None:
        """Create a topic; -1 means the broker's default. Done when its partitions are served here.

        It is created in the name of ``session``, and counts for its client's quotas; without one in
        this node's, which has none.

        Raises the error of the response, and as
        :meth:`~kept.node.kafka.forwarding_manager.ForwardingManager.forward`.
        """
        topic: dict[str, Any] = {
            "name": name,
            "num_partitions": num_partitions,
            "replication_factor": replication_factor,
            "assignments": (),
            "configs": [{"name": key, "value": value} for key, value in (configs or {}).items()],
        }
        values = {"topics": [topic], "timeout": 30_000, "validate_only": False}
        speaker = session or node_session(self.config.current.listeners[0].name)
        context = RequestContext(ApiKey.CREATE_TOPICS, CREATE_TOPICS_VERSION, client_id, speaker)
        response = await self.forwarding.request(context, values)
        (created,) = response.topics
        error = failure(int(created.error_code), f"CreateTopics of {name}", created.error_message)
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame

    async def create_internal(self, name: str) -> None:
        """Create an internal topic unless it exists. Raises as :meth:`create`."""
        image, config = self.metadata.image, self.config.current
        if name in image.topics:
            return
        defaults = internal_topics.defaults(name, image, config)
        try:
            await self.create(
                name,
                num_partitions=defaults.num_partitions,
                replication_factor=defaults.replication_factor,
                configs=internal_topics.settings(name, config, {}),
            )
        except TopicAlreadyExists:
            return

    async def create_for_client(self, name: str, ctx: RequestContext) -> int:
        """Create a topic that the Metadata request of ``ctx`` named, in the name of whoever made
        it. Gives the error code, 0 if it exists now; the reason of a PolicyViolation is logged,
        since Metadata has no place for it.
        """
        try:
            if name in internal_topics.COORDINATED:
                await self.create_internal(name)
            else:
                await self.create(name, session=ctx.session, client_id=ctx.client_id)
        except TopicAlreadyExists:
            return 0
        except KeptError as error:
            if isinstance(error, PolicyViolation):
                self.open_files.refused(name, error)
            if isinstance(error, ThrottlingQuotaExceeded):
                error = UnknownTopicOrPartition(name)  # whom Metadata tells this, asks again
            return error_codes.code_for(error)
        return 0
