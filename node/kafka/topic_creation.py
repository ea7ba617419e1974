"""Topics that this node makes by itself: because a client named one, or for groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kept.client.api_keys import ApiKey
from kept.client.failures import failure
from kept.node.kafka import api
from kept.node.metadata import internal_topics
from kept.storage.errors import TopicAlreadyExists

if TYPE_CHECKING:
    from kept.node.kafka.apis import KafkaApis

CREATE_TOPICS_VERSION: Final = 7


async def create_topic(
    apis: KafkaApis,
    name: str,
    *,
    num_partitions: int = -1,
    replication_factor: int = -1,
    configs: Mapping[str, str | None] | None = None,
) -> None:
    """Have the active controller create a topic; -1 means the broker's default. Done when its
    partitions are served here. Raises the error of the answer, and as
    :meth:`~kept.node.kafka.forwarding.ForwardingManager.forward`.
    """
    topic: dict[str, Any] = {
        "name": name,
        "num_partitions": num_partitions,
        "replication_factor": replication_factor,
        "assignments": (),
        "configs": [{"name": key, "value": value} for key, value in (configs or {}).items()],
    }
    values = {"topics": [topic], "timeout": 30_000, "validate_only": False}
    listener = apis.config.current.listeners[0].name
    context = api.RequestContext(
        apis, None, ApiKey.CREATE_TOPICS, CREATE_TOPICS_VERSION, 0, None, listener
    )
    answer = await apis.forwarding.request(context, values)
    (created,) = answer.topics
    error = failure(int(created.error_code), f"CreateTopics of {name}", created.error_message)
    if error is not None:
        raise error


async def create_internal_topic(apis: KafkaApis, name: str) -> None:
    """Create an internal topic unless it exists. Raises as :func:`create_topic`."""
    image, config = apis.metadata.image, apis.config.current
    if name in image.topics:
        return
    defaults = internal_topics.defaults(image, config)
    try:
        await create_topic(
            apis,
            name,
            num_partitions=defaults.num_partitions,
            replication_factor=defaults.replication_factor,
            configs=internal_topics.settings(config, {}),
        )
    except TopicAlreadyExists:
        return
