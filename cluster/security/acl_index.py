"""Which ACL binding decides: an immutable index of all bindings, and the decision on a resource.

The decision is Kafka's (``StandardAuthorizerData``): of the bindings that name the resource (its
name literally, a prefix of it, or the wildcard) and fit the principal, the host and the operation,
any DENY denies; else any ALLOW allows; else the resource is denied if any binding names it, whoever
it is for. ALLOW of Read, Write, Delete or Alter implies Describe, and of AlterConfigs
DescribeConfigs; All stands for every operation. DENY implies nothing.

Where several bindings would decide alike, the decision names the most specific: the principal's own
before everybody's, then the literal name, then prefixes from the longest on, then the wildcard,
then the host's own before any host's.

Hosts are compared as addresses, not as text: ``::1`` is ``0:0:0:0:0:0:0:1``, as Java spells it, and
an IPv4 address is the same one written as IPv6. Kafka compares text.

A decision looks into one dict for each distinct length of prefixes, so that its cost does not grow
with the number of bindings. :meth:`AclIndex.with_changes` copies what is kept for the principals
concerned and shares the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Final, TypeVar

from msgspec import Struct

from kept.cluster.metadata.persistent_map import PersistentMap
from kept.cluster.security.acls import (
    WILDCARD,
    WILDCARD_PRINCIPAL,
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.cluster.security.addresses import canonical_address

K = TypeVar("K")

ALLOW: Final = AclPermission.ALLOW
DENY: Final = AclPermission.DENY
LITERAL: Final = PatternType.LITERAL
PREFIXED: Final = PatternType.PREFIXED
"""An attribute of an enum's class costs 0.2 us: a decision would spend its time with these."""

_Hosts = dict[str, tuple[AclBinding, ...]]
"""The bindings of one principal that name a resource by the same pattern, by canonical host."""

_DENYING: Final[Mapping[int, frozenset[int]]] = {
    operation: frozenset({operation, AclOperation.ALL}) for operation in AclOperation
}
_ALLOWING: Final[Mapping[int, frozenset[int]]] = {
    **_DENYING,
    AclOperation.DESCRIBE: frozenset(
        {
            AclOperation.ALL,
            AclOperation.DESCRIBE,
            AclOperation.READ,
            AclOperation.WRITE,
            AclOperation.DELETE,
            AclOperation.ALTER,
        }
    ),
    AclOperation.DESCRIBE_CONFIGS: frozenset(
        {AclOperation.ALL, AclOperation.DESCRIBE_CONFIGS, AclOperation.ALTER_CONFIGS}
    ),
}


class Decision(Struct, frozen=True):
    """What the bindings say: ``allowed`` is None where no binding names the resource, and
    ``binding`` the one that decided, None where none fits.
    """

    allowed: bool | None
    binding: AclBinding | None = None


@lru_cache(maxsize=4096)
def canonical_host(host: str) -> str:
    """The one spelling of an address; what is none (``*``, a host's name) stays as it is."""
    try:
        return canonical_address(host)
    except ValueError:
        return host


class _Bindings(Struct, frozen=True):
    """The bindings of one principal for one type of resource: literals by name, and prefixes by
    length, the longest first, and text.
    """

    literals: Mapping[str, _Hosts]
    prefixes: Sequence[tuple[int, Mapping[str, _Hosts]]]

    def naming(self, name: str) -> list[_Hosts | None]:
        """Those that name a resource, the most specific first; None where a look-up found none."""
        literals, length_of_name = self.literals, len(name)
        return [
            literals.get(name),
            *[
                by_text.get(name[:length])
                for length, by_text in self.prefixes
                if length <= length_of_name
            ],
            literals.get(WILDCARD),
        ]


_NO_BINDINGS: Final = _Bindings({}, ())
_NO_TYPES: Final[Mapping[AclResourceType, _Bindings]] = {}


class AclIndex:
    """Bindings, each with how often it is there; never changed. Begin with ``AclIndex()`` and go on
    by :meth:`with_changes`. Equal if they have the same bindings.
    """

    __slots__ = ("_count", "_duplicates", "_literals", "_prefixes", "_principals")

    def __init__(self) -> None:
        self._principals: PersistentMap[str, Mapping[AclResourceType, _Bindings]] = PersistentMap()
        """By principal and type of resource."""
        self._literals: PersistentMap[str, int] = PersistentMap()
        """How many bindings have a type and a literal name, whoever they are for."""
        self._prefixes: Mapping[AclResourceType, Mapping[int, Mapping[str, int]]] = {}
        """How many bindings have a type and a prefix: by type, length and text."""
        self._duplicates: Mapping[AclBinding, int] = {}
        """How often a binding is there besides once: logs of Apache Kafka may have the same one
        under several ids."""
        self._count = 0

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AclIndex):
            return NotImplemented
        return self is other or (
            self._count == other._count
            and self._duplicates == other._duplicates
            and dict(self._principals.items()) == dict(other._principals.items())
        )

    def __len__(self) -> int:
        """The number of different bindings."""
        return self._count

    def __contains__(self, binding: AclBinding) -> bool:
        types: Mapping[AclResourceType, _Bindings] = self._principals.get(
            binding.principal, _NO_TYPES
        )
        kept = types.get(binding.resource_type, _NO_BINDINGS)
        hosts = _by_name(kept, binding).get(binding.name, {})
        return binding in hosts.get(canonical_host(binding.host), ())

    def with_changes(
        self, added: Iterable[AclBinding] = (), removed: Iterable[AclBinding] = ()
    ) -> AclIndex:
        """The index with each of ``removed`` once less, and each of ``added`` once more. What is
        removed may be absent.
        """
        duplicates = {**self._duplicates}
        gone: set[AclBinding] = set()
        for binding in removed:
            if binding in duplicates:
                _count(duplicates, binding, -1)
            elif binding in self:
                gone.add(binding)
        new: set[AclBinding] = set()
        for binding in added:
            if binding in gone:
                gone.remove(binding)
            elif binding in new or binding in self:
                _count(duplicates, binding, 1)
            else:
                new.add(binding)
        concerned: defaultdict[str, list[AclBinding]] = defaultdict(list)
        for binding in (*gone, *new):
            concerned[binding.principal].append(binding)
        principals, literals = self._principals.edit(), self._literals.edit()
        prefixes: list[AclBinding] = []
        for principal, bindings in concerned.items():
            types = _with(principals.get(principal, _NO_TYPES), bindings)
            if types:
                principals[principal] = types
            else:
                del principals[principal]
            for binding in bindings:
                step = -1 if binding in gone else 1
                if binding.pattern is PREFIXED:
                    prefixes.append(binding)
                else:
                    _count(literals, _literal_key(binding.resource_type, binding.name), step)
        successor = AclIndex()
        successor._count = self._count + len(new) - len(gone)
        successor._duplicates = duplicates
        successor._principals, successor._literals = principals.finish(), literals.finish()
        successor._prefixes = _with_prefixes(self._prefixes, prefixes, gone)
        return successor

    def decide(
        self,
        principal: str,
        host: str,
        operation: AclOperation,
        resource_type: AclResourceType,
        name: str,
    ) -> Decision:
        """What the bindings say of an operation on a resource: see the module."""
        denying, allowing = _DENYING[operation], _ALLOWING[operation]
        address = canonical_host(host)
        allowed: AclBinding | None = None
        is_named = False
        for each in _principals_of(principal):
            types: Mapping[AclResourceType, _Bindings] = self._principals.get(each, _NO_TYPES)
            for hosts in types.get(resource_type, _NO_BINDINGS).naming(name):
                if hosts is None:
                    continue
                is_named = True
                for bindings in (hosts.get(address, ()), hosts.get(WILDCARD, ())):
                    for binding in bindings:
                        if binding.permission is DENY:
                            if binding.operation in denying:
                                return Decision(allowed=False, binding=binding)
                        elif (
                            allowed is None
                            and binding.permission is ALLOW
                            and binding.operation in allowing
                        ):
                            allowed = binding
        if allowed is not None:
            return Decision(allowed=True, binding=allowed)
        if is_named or self._is_named(resource_type, name):
            return Decision(allowed=False)
        return Decision(allowed=None)

    def allows_any(
        self, principal: str, host: str, operation: AclOperation, resource_type: AclResourceType
    ) -> bool:
        """Whether the principal may do it on at least one resource of the type: an ALLOW that no
        DENY covers by the wildcard, the same literal or a prefix of it
        (``Authorizer.authorizeByResourceType``). Nothing is implied here, as in Kafka.
        """
        fitting = _DENYING[operation]
        address = canonical_host(host)
        sets: dict[tuple[AclPermission, PatternType], set[str]] = defaultdict(set)
        for each in _principals_of(principal):
            types: Mapping[AclResourceType, _Bindings] = self._principals.get(each, _NO_TYPES)
            kept = types.get(resource_type, _NO_BINDINGS)
            for table in (kept.literals, *[by_text for _, by_text in kept.prefixes]):
                for name, hosts in table.items():
                    for binding in (*hosts.get(address, ()), *hosts.get(WILDCARD, ())):
                        if binding.operation in fitting:
                            sets[binding.permission, binding.pattern].add(name)
        denied_literals = sets[DENY, LITERAL]
        if WILDCARD in denied_literals:
            return False
        allowed_literals = sets[ALLOW, LITERAL]
        if WILDCARD in allowed_literals:
            return True
        denied_prefixes = sets[DENY, PREFIXED]
        lengths = {len(prefix) for prefix in denied_prefixes}
        names = (allowed_literals - denied_literals) | sets[ALLOW, PREFIXED]
        return any(not any(name[:n] in denied_prefixes for n in lengths) for name in names)

    def has_wildcard(self, resource_type: AclResourceType) -> bool:
        """Whether a binding names every resource of the type."""
        return _literal_key(resource_type, WILDCARD) in self._literals

    def _is_named(self, resource_type: AclResourceType, name: str) -> bool:
        """Whether any binding names the resource, whoever it is for."""
        for literal in (WILDCARD, name):
            if _literal_key(resource_type, literal) in self._literals:
                return True
        length_of_name = len(name)
        for length, texts in self._prefixes.get(resource_type, {}).items():
            if length <= length_of_name and name[:length] in texts:
                return True
        return False


def _principals_of(principal: str) -> tuple[str, ...]:
    if principal == WILDCARD_PRINCIPAL:
        return (principal,)
    return (principal, WILDCARD_PRINCIPAL)


def _literal_key(resource_type: int, name: str) -> str:
    return f"{resource_type:d} {name}"


def _by_name(kept: _Bindings, binding: AclBinding) -> Mapping[str, _Hosts]:
    """The part of what is kept in which a binding has its place."""
    if binding.pattern is not PREFIXED:
        return kept.literals
    return dict(kept.prefixes).get(len(binding.name), {})


def _with(
    types: Mapping[AclResourceType, _Bindings], bindings: Iterable[AclBinding]
) -> Mapping[AclResourceType, _Bindings]:
    """What is kept for a principal once those of ``bindings`` that it has are removed, and the
    others added.
    """
    made = {**types}
    by_type: defaultdict[AclResourceType, list[AclBinding]] = defaultdict(list)
    for binding in bindings:
        by_type[binding.resource_type].append(binding)
    for number, changed in by_type.items():
        kept = types.get(number, _NO_BINDINGS)
        literals = {**kept.literals}
        prefixes = {length: {**by_text} for length, by_text in kept.prefixes}
        copied: set[tuple[PatternType, str]] = set()
        for binding in changed:
            table = literals
            if binding.pattern is PREFIXED:
                table = prefixes.setdefault(len(binding.name), {})
            hosts = table.get(binding.name, {})
            if (binding.pattern, binding.name) not in copied:
                copied.add((binding.pattern, binding.name))
                hosts = {**hosts}
            host = canonical_host(binding.host)
            rest = {*hosts.pop(host, ())} ^ {binding}
            if rest:
                hosts[host] = tuple(sorted(rest))
            table[binding.name] = hosts
            if not hosts:
                del table[binding.name]
                copied.discard((binding.pattern, binding.name))
        in_order = sorted(((n, by) for n, by in prefixes.items() if by), key=itemgetter(0))
        made[number] = _Bindings(literals, tuple(reversed(in_order)))
        if not (made[number].literals or made[number].prefixes):
            del made[number]
    return made


def _with_prefixes(
    counts: Mapping[AclResourceType, Mapping[int, Mapping[str, int]]],
    bindings: Iterable[AclBinding],
    gone: set[AclBinding],
) -> Mapping[AclResourceType, Mapping[int, Mapping[str, int]]]:
    """The counts of prefixes once ``bindings`` are added, or removed if they are ``gone``."""
    copies: dict[tuple[AclResourceType, int], dict[str, int]] = {}
    for binding in bindings:
        key = (binding.resource_type, len(binding.name))
        if key not in copies:
            copies[key] = {**counts.get(key[0], {}).get(key[1], {})}
        _count(copies[key], binding.name, -1 if binding in gone else 1)
    made = {resource_type: {**by_length} for resource_type, by_length in counts.items()}
    for (resource_type, length), texts in copies.items():
        made.setdefault(resource_type, {})[length] = texts
        if not texts:
            del made[resource_type][length]
    return {resource_type: by_length for resource_type, by_length in made.items() if by_length}


def _count(counts: MutableMapping[K, int], key: K, step: int) -> None:
    """Add ``step`` to a count; one that becomes zero goes."""
    if counts.get(key, 0) + step:
        counts[key] = counts.get(key, 0) + step
    else:
        del counts[key]
