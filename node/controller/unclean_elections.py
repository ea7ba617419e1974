"""Unclean elections are told by the active controller, whoever asked for them or nobody.

A line with what is known of the logs, for acknowledged records may be lost (rule 36), and a count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kept.cluster.controller import decisions
from kept.node.runtime.logging import log

if TYPE_CHECKING:
    from kept.cluster.controller.unclean_recovery import Reports
    from kept.cluster.metadata.image import Delta, Image
    from kept.node.node import Node


def reports(node: Node) -> Reports:
    """What replicas have told the controller of their logs; nothing in a cluster of one."""
    return {} if node.cluster_link is None else node.cluster_link.controller.sessions.reports


def tell(node: Node, image: Image, delta: Delta) -> None:
    """Tell the unclean elections of an entry that the active controller is about to act on."""
    if not delta.partitions or not node.metadata.leads:
        return
    for election in decisions.unclean_elections(image, delta, reports(node)):
        node.metrics.cluster.unclean_elections += 1
        log.warning("unclean election", report=str(election))
