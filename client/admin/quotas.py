"""Client quotas: operations without I/O (see :mod:`kept.client.admin.topics`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kept.client.admin.topics import Operation, first_error
from kept.client.core.broker_errors import failure
from kept.client.core.calls import Anywhere, Call
from kept.client.protocol.api_keys import ApiKey

EXACT: Final = 0
DEFAULT: Final = 1
"""How a part of a filter is compared, in Kafka's numbers: with this name, or with the default."""

Entity = tuple[tuple[str, str | None], ...]
"""Who a quota is for: pairs of type (``user``, ``client-id``, ``ip``) and name, sorted by type;
None as a name stands for all that have no quota of their own.
"""


def describe_quotas(
    parts: Sequence[tuple[str, int, str | None]] = (),
) -> Operation[dict[Entity, dict[str, float]]]:
    """The quotas of the entities that have all these parts: (type, :data:`EXACT` or
    :data:`DEFAULT`, name); of all entities where none is given. Quotas by their key, such as
    ``producer_byte_rate``.
    """
    what = "DescribeClientQuotas"
    components = [
        {"entity_type": kind, "match_type": match_type, "match": name}
        for kind, match_type, name in parts
    ]
    (response,) = yield [
        Call(
            ApiKey.DESCRIBE_CLIENT_QUOTAS,
            {"components": components, "strict": False},
            Anywhere(),
            what=what,
            check=lambda r: failure(int(r.error_code), what, r.error_message),
        )
    ]
    return {
        _entity(entry): {value.key: float(value.value) for value in entry.values}
        for entry in response.entries or ()
    }


def alter_quotas(entity: Entity, changes: Mapping[str, float | None]) -> Operation[None]:
    """Set quotas of an entity by their key; None removes one, also one that is not there."""
    ops = [
        {"key": key, "value": 0.0 if value is None else value, "remove": value is None}
        for key, value in changes.items()
    ]
    named = [{"entity_type": kind, "entity_name": name} for kind, name in entity]
    what = "AlterClientQuotas"
    yield [
        Call(
            ApiKey.ALTER_CLIENT_QUOTAS,
            {"entries": [{"entity": named, "ops": ops}], "validate_only": False},
            Anywhere(),
            what=what,
            check=lambda r: first_error(r.entries, lambda _: what),
        )
    ]


def _entity(entry: Any) -> Entity:
    return tuple(sorted((part.entity_type, part.entity_name) for part in entry.entity))
