"""Decisions on client quotas (``ClientQuotaControlManager``). Pure functions.

What is legal is decided in :mod:`kept.cluster.security.client_quotas`. Each entity of a request is
changed whole or not at all, and by itself; a value that is in force already is no change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import ClientQuotaRecord
from kept.cluster.security.client_quotas import (
    Alteration,
    QuotaEntity,
    check_alteration,
    describe_entity,
)
from kept.steps import Steps
from kept.storage.errors import InvalidRequest, KeptError


def alter_client_quotas(
    image: Image, alterations: Sequence[Alteration]
) -> Steps[tuple[dict[QuotaEntity, KeptError | None], list[ClientQuotaRecord]]]:
    """What becomes of each entity, and the records of all changes. Yields after each entity.

    As in Kafka only the first of an entity's alterations counts, and the entity is answered with an
    error then, and so it is where one of its alterations names a key twice.
    """
    results: dict[QuotaEntity, KeptError | None] = {}
    records: list[ClientQuotaRecord] = []
    for alteration in alterations:
        yield
        entity = alteration.entity
        keys = Counter(key for key, _ in alteration.changes)
        if entity in results or any(count > 1 for count in keys.values()):
            results[entity] = InvalidRequest(f"Ignoring duplicate entity {describe_entity(entity)}")
            continue
        try:
            check_alteration(alteration)
        except KeptError as error:
            results[entity] = error.without_frames()
            continue
        results[entity] = None
        current = image.quotas.get(entity, {})
        records.extend(
            ClientQuotaRecord(entity, key, value)
            for key, value in alteration.changes
            if current.get(key) != value
        )
    return results, records
