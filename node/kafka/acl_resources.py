"""What requests and the items in them are about: resources for the access entries of APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kept.cluster.metadata.records import ResourceType
from kept.cluster.security.acls import AclResourceType
from kept.node.security.access import CLUSTER, Resource

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image

GROUP_CONFIGS: Final = 32
"""The resource type of groups' settings, which there are none of here."""


def topic(item: Any, image: Image) -> Resource | None:
    """The topic that an item names, by name or by id; None for an id that no topic has."""
    name = getattr(item, "name", None)
    if name is None:  # an empty one is a name, too, which is asked about as any other
        name = getattr(item, "topic", None)
    if name is None:
        topic_id = getattr(item, "topic_id", None)
        known = None if topic_id is None else image.topics_by_id.get(topic_id)
        if known is None:
            return None
        name = known.name
    return AclResourceType.TOPIC, name


def group(item: Any, _image: Image | None = None) -> Resource:
    """The group that a request is about, or that is an item of it."""
    return AclResourceType.GROUP, item if isinstance(item, str) else item.group_id


def transactional_id(item: Any, _image: Image | None = None) -> Resource:
    """The transactional id that a request is about, or that is an item of it."""
    name = item if isinstance(item, str) else item.transactional_id
    return AclResourceType.TRANSACTIONAL_ID, name


def configured(item: Any, _image: Image) -> Resource:
    """What an item changes or asks the settings of; brokers' settings are the cluster's."""
    if item.resource_type == ResourceType.TOPIC:
        return AclResourceType.TOPIC, item.resource_name
    if item.resource_type == GROUP_CONFIGS:
        return AclResourceType.GROUP, item.resource_name
    return CLUSTER
