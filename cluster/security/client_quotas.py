"""Client quotas: which one counts for whom, what may be set, and filters over them. Pure.

An entity is who a quota is for: a user, a client id, both, or an IP address; None as a name stands
for all that have no quota of their own (the default). Sources: ``ClientQuotaManager`` (precedence
and what shares a rate), ``ClientQuotaControlManager`` (validation), ``ClientQuotasImage`` (filters)
of Apache Kafka 4.3. Unlike Kafka, which resolves them, host names are no IP entities: an address
says who is meant. Values that are no finite numbers are refused, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Final

from msgspec import Struct

from kept.cluster.security.addresses import canonical_address
from kept.storage.errors import InvalidRequest, UnsupportedVersion

USER: Final = "user"
CLIENT_ID: Final = "client-id"
IP: Final = "ip"
TYPES: Final = (USER, CLIENT_ID, IP)

PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
CONSUMER_BYTE_RATE: Final = "consumer_byte_rate"
REQUEST_PERCENTAGE: Final = "request_percentage"
CONTROLLER_MUTATION_RATE: Final = "controller_mutation_rate"
CONNECTION_CREATION_RATE: Final = "connection_creation_rate"

_MAX_LONG: Final = float(2**63 - 1)
_MAX_INT: Final = float(2**31 - 1)
_OF_CLIENTS: Final[Mapping[str, tuple[float, str]]] = {
    PRODUCER_BYTE_RATE: (_MAX_LONG, "a LONG"),
    CONSUMER_BYTE_RATE: (_MAX_LONG, "a LONG"),
    REQUEST_PERCENTAGE: (0.0, ""),
    CONTROLLER_MUTATION_RATE: (0.0, ""),
}
"""What may be set for users and client ids: the largest integer, and its type; 0: any number."""
_OF_ADDRESSES: Final[Mapping[str, tuple[float, str]]] = {
    CONNECTION_CREATION_RATE: (_MAX_INT, "an INT")
}
_FRACTION: Final = 1e-6
"""What is left of a number beyond its integer part and is not taken for a fraction."""
MAX_NAME_BYTES: Final = 32_767
"""A STRING of Kafka's protocol holds no more."""

QuotaEntity = tuple[tuple[str, str | None], ...]
"""Pairs of type (:data:`TYPES`) and name, sorted by type; None is the default's name."""
Quotas = Mapping[QuotaEntity, Mapping[str, float]]
"""The quotas of each entity by their key (``producer_byte_rate``)."""


def entity(names: Mapping[str, str | None]) -> QuotaEntity:
    """The entity with these names by type."""
    return tuple(sorted(names.items()))


def describe_entity(of: QuotaEntity) -> str:
    """An entity in words, for messages."""
    return ", ".join(
        f"{kind} {repr(name) if name is not None else '<default>'}" for kind, name in of
    )


class EffectiveQuota(Struct, frozen=True):
    """A quota that counts for a client. All who have the same ``user`` and ``client_id`` here share
    its rate; one that is empty does not matter.
    """

    bound: float
    user: str
    client_id: str


def effective_quota(quotas: Quotas, key: str, user: str, client_id: str) -> EffectiveQuota | None:
    """The quota ``key`` that counts for a user's client, the most specific of those that fit; None:
    there is none.

    The quota of a user without client id is shared by his clients, that of a client id without user
    by all its users. Quotas of client ids are not for clients without one, as in Kafka.
    """
    for of, shared_user, shared_client in _candidates(user, client_id):
        bound = quotas.get(of, {}).get(key)
        if bound is not None:
            return EffectiveQuota(bound, shared_user, shared_client)
    return None


def deciding_entity(quotas: Quotas, key: str, user: str, client_id: str) -> QuotaEntity | None:
    """Whose quota ``key`` counts for a user's client, by the rules of :func:`effective_quota`."""
    for of, _, _ in _candidates(user, client_id):
        if key in quotas.get(of, {}):
            return of
    return None


def _candidates(user: str, client_id: str) -> Iterator[tuple[QuotaEntity, str, str]]:
    """Entities that fit, the most specific first, and who shares the rate of each."""
    for name in (user, None):
        if client_id:
            yield ((CLIENT_ID, client_id), (USER, name)), user, client_id
            yield ((CLIENT_ID, None), (USER, name)), user, client_id
        yield ((USER, name),), user, ""
    if client_id:
        yield ((CLIENT_ID, client_id),), "", client_id
        yield ((CLIENT_ID, None),), "", client_id


class Alteration(Struct, frozen=True):
    """Changes of one entity's quotas: keys and values as requested; None takes one back."""

    entity: QuotaEntity
    changes: Sequence[tuple[str, float | None]]


def check_alteration(alteration: Alteration) -> None:
    """Raises InvalidRequest for what may not be set, with Kafka's messages."""
    keys = _keys_of(alteration.entity)
    for key, value in alteration.changes:
        if value is not None:
            _check_value(keys, key, value)


def _keys_of(of: QuotaEntity) -> Mapping[str, tuple[float, str]]:
    """What may be set for an entity. Raises InvalidRequest for one that may not be."""
    if not of:
        raise InvalidRequest("Invalid empty client quota entity")
    for kind, name in of:
        if kind not in TYPES:
            raise InvalidRequest(f"Unhandled client quota entity type: {kind}")
        if name == "":
            raise InvalidRequest(f"Empty {kind} not supported")
        if name is not None and len(name.encode()) > MAX_NAME_BYTES:
            raise InvalidRequest(f"The name of a {kind} exceeds {MAX_NAME_BYTES} bytes")
    names = dict(of)
    if IP not in names:
        return _OF_CLIENTS
    if len(names) > 1:
        raise InvalidRequest(
            "Invalid quota entity combination, IP entity shouldnot be combined with User or "
            "ClientId"
        )
    if (address := names[IP]) is not None:
        try:
            canonical_address(address)
        except ValueError:
            raise InvalidRequest(f"{address} is not a valid IP address.") from None
    return _OF_ADDRESSES


def _check_value(keys: Mapping[str, tuple[float, str]], key: str, value: float) -> None:
    if key not in keys:
        raise InvalidRequest(f"Invalid configuration key {key}")
    if not math.isfinite(value):
        raise InvalidRequest(f"Quota {key} must be a finite number")
    if value <= 0:
        raise InvalidRequest(f"Quota {key} must be greater than 0")
    most, kind = keys[key]
    if most and value > most:
        raise InvalidRequest(f"Proposed value for {key} is too large for {kind}.")
    if most and value % 1.0 > _FRACTION:
        raise InvalidRequest(f"{key} cannot be a fractional value.")


class MatchType(IntEnum):
    """How a filter's component is compared; Kafka's numbers."""

    EXACT = 0
    DEFAULT = 1
    SPECIFIED = 2


class FilterComponent(Struct, frozen=True):
    """What an entity must have of one type: this name, the default, or any of both."""

    entity_type: str
    match_type: int
    match: str | None = None


def check_filter(components: Iterable[FilterComponent]) -> None:
    """Raises InvalidRequest or UnsupportedVersion for a filter that is none."""
    seen = set()
    for component in components:
        kind, match_type = component.entity_type, component.match_type
        if not kind:
            raise InvalidRequest("Invalid empty entity type.")
        if kind in seen:
            raise InvalidRequest(f"Entity type {kind} cannot appear more than once in the filter.")
        if kind not in TYPES:
            raise UnsupportedVersion(f"Unsupported entity type {kind}")
        if match_type not in MatchType.__members__.values():
            raise InvalidRequest(f"Unknown match type {match_type}")
        name = f"MATCH_TYPE_{MatchType(match_type).name}"
        if match_type == MatchType.EXACT and component.match is None:
            raise InvalidRequest(f"Request specified {name}, but set match string to null.")
        if match_type != MatchType.EXACT and component.match is not None:
            raise InvalidRequest(f"Request specified {name}, but also specified a match string.")
        seen.add(kind)
    if IP in seen and len(seen) > 1:
        raise InvalidRequest(
            "Invalid entity filter component combination. IP filter component should not be used "
            "with user or clientId filter component."
        )


def matches(components: Sequence[FilterComponent], *, strict: bool, of: QuotaEntity) -> bool:
    """Whether an entity passes a filter: ``strict`` allows no further types. A filter without
    components finds all entities, a strict one none.
    """
    names = dict(of)
    if strict and len(names) != len(components):
        return False
    for component in components:
        if component.entity_type not in names:
            return False
        name = names[component.entity_type]
        if component.match_type != MatchType.SPECIFIED and name != component.match:
            return False
    return True
