"""Feature levels (KIP-584): what every broker can do, so that clients may rely on it.

A broker says with each heartbeat up to which level it serves each feature. When every registered
broker has said so to the active controller, the level is finalized: a
:class:`~kept.cluster.metadata.records.FeatureRecord`. A level is never lowered, and a broker that
does not serve what is finalized is not registered. Voters that are no brokers are not asked: an
older one refuses the records that it cannot read, and stops, until it is replaced. In Kafka an
administrator raises levels, and the records of registrations hold what brokers serve; heartbeats do
here, so that no older node meets a record that it cannot read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import FeatureRecord
from kept.storage.errors import UnsupportedVersion

TRANSACTION_VERSION: Final = "transaction.version"
"""Kafka's feature: 1 has flexible records of transactions, 2 a new epoch for each (KIP-890)."""

SECURITY: Final = "kept.security"
"""Ours: 1 has records of ACLs, SCRAM credentials and client quotas. None is written before."""


class Feature(Struct, frozen=True):
    """A feature, and the highest level of it that a broker serves; the lowest is 0."""

    name: str
    max_level: int


SUPPORTED: Final = (Feature(TRANSACTION_VERSION, 2), Feature(SECURITY, 1))
"""What this version serves."""


def unsupported_features(image: Image, served: Iterable[Feature]) -> list[str]:
    """Features that are finalized at a level which a broker with those ``served`` does not know."""
    levels = {feature.name: feature.max_level for feature in served}
    return [name for name, level in image.features.items() if levels.get(name, 0) < level]


def common_levels(served: Iterable[Iterable[Feature]]) -> dict[str, int]:
    """The highest level of each feature that all brokers serve; one tuple for each broker."""
    each = [{feature.name: feature.max_level for feature in features} for features in served]
    names = set[str]().union(*each)
    return {name: min(levels.get(name, 0) for levels in each) for name in sorted(names)}


def check_security(image: Image, lacking: Iterable[int]) -> None:
    """Raises UnsupportedVersion unless records of security may be written. ``lacking`` are the
    nodes that have not said that they can read them.
    """
    if not image.features.get(SECURITY):
        nodes = ", ".join(map(str, lacking)) or "of this cluster"
        raise UnsupportedVersion(
            f"ACLs, SCRAM credentials and client quotas need {SECURITY} 1, but node(s) {nodes} "
            "have not said that they serve it: let each run once, by this version or a later one"
        )


def raise_levels(image: Image, levels: Mapping[str, int]) -> list[FeatureRecord]:
    """The records that finalize ``levels`` where they are above those of the image."""
    return [
        FeatureRecord(name, level)
        for name, level in levels.items()
        if level > image.features.get(name, 0)
    ]
