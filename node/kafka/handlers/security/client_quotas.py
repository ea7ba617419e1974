"""DescribeClientQuotas and AlterClientQuotas (KIP-546)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kept.client.protocol.messages import Values
from kept.cluster.controller.client_quota_changes import alter_client_quotas
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import MetadataRecord
from kept.cluster.security.client_quotas import (
    Alteration,
    FilterComponent,
    QuotaEntity,
    check_filter,
    entity,
    matches,
)
from kept.node.kafka.metadata_changes import Decided
from kept.node.runtime.error_codes import error_values
from kept.steps import Steps
from kept.storage.errors import InvalidRequest, KeptError, UnsupportedVersion

if TYPE_CHECKING:
    from kept.node.kafka.api import RequestContext
    from kept.node.kafka.metadata_changes import MetadataChanges
    from kept.node.metadata.metadata_log import MetadataLog

Results = dict[QuotaEntity, KeptError | None]


@dataclass(frozen=True, slots=True)
class ClientQuotasHandler:
    """How much clients may use."""

    metadata: MetadataLog
    metadata_changes: MetadataChanges

    def describe_client_quotas(self, _ctx: RequestContext, request: Any) -> Steps[Values]:
        """DescribeClientQuotas v0-1: the quotas of the entities that a filter finds."""
        components = [
            FilterComponent(each.entity_type, each.match_type, each.match)
            for each in request.components
        ]
        try:
            check_filter(components)
        except (InvalidRequest, UnsupportedVersion) as error:
            return {**error_values(error), "entries": None}
        entries = []
        for of, quotas in self.metadata.image.quotas.items():
            yield
            if matches(components, strict=request.strict, of=of):
                values = [{"key": key, "value": value} for key, value in quotas.items()]
                entries.append({"entity": _named(of), "values": values})
        return {**error_values(None), "entries": entries}

    async def alter_client_quotas(self, _ctx: RequestContext, request: Any) -> Values:
        """AlterClientQuotas v0-1: each entity is changed or refused by itself."""
        alterations = [
            Alteration(
                entity({part.entity_type: part.entity_name for part in entry.entity}),
                [(op.key, None if op.remove else op.value) for op in entry.ops],
            )
            for entry in request.entries
        ]

        def decision(image: Image) -> Steps[Decided[Results]]:
            self.metadata_changes.check_security(image)
            results, records = yield from alter_client_quotas(image, alterations)
            written: Sequence[MetadataRecord] = () if request.validate_only else records
            return results, written

        try:
            results = await self.metadata_changes.decide(decision)
        except UnsupportedVersion as error:
            results = dict.fromkeys((alteration.entity for alteration in alterations), error)
        return {
            "entries": [
                {**error_values(error), "entity": _named(of)} for of, error in results.items()
            ]
        }


def _named(of: QuotaEntity) -> list[Values]:
    return [{"entity_type": kind, "entity_name": name} for kind, name in of]
