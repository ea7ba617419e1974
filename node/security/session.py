"""Who speaks on a connection or in a call."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kept.cluster.security.acls import ANONYMOUS, OPERATIONS, AclOperation, AclResourceType

if TYPE_CHECKING:
    from kept.node.security.sasl_authenticator import SaslAuthenticator


class Grants(Protocol):
    """Names and ids of topics of which it is known that a session may write or read them."""

    def __contains__(self, item: object, /) -> bool: ...

    def add(self, item: Any, /) -> None:
        """This one, too."""

    def clear(self) -> None:
        """The rules changed: nothing is known any more."""


class AllGranted:
    """Grants that contain whatever is looked for: where nothing is forbidden."""

    def __contains__(self, item: object, /) -> bool:
        return True

    def add(self, item: Any, /) -> None:
        """It is there."""

    def clear(self) -> None:
        """No rule forbids anything."""


class Renewal(NamedTuple):
    """A session's client logs in again: where that stands, and since when by the loop's clock."""

    authenticator: SaslAuthenticator
    begun_at: float


class Session:
    """Who speaks: a principal (``User:ada``), the address that it speaks from, the listener that it
    came in by, and how it said who it is (``mechanism``: a SASL mechanism, ``SSL``, or "").

    ``expires_at`` is by the loop's clock. ``is_node`` is true of members of the cluster, which may
    do everything that members do. ``writable`` and ``readable`` are names and ids of topics, as on
    the wire, of which it is known that this session may write or read them, so that the hot paths
    look once and in one place; a change of ACLs clears them. Where nothing is forbidden they
    contain everything (:meth:`Authorizer.grants`). Without an ``authorizer`` nothing is allowed.
    ``renewal`` is the last time that the client logged in again (KIP-368).
    """

    __slots__ = (
        "authorizer",
        "expires_at",
        "host",
        "is_node",
        "listener",
        "mechanism",
        "principal",
        "readable",
        "renewal",
        "writable",
    )

    def __init__(
        self,
        principal: str = ANONYMOUS,
        host: str = "",
        listener: str = "",
        mechanism: str = "",
        *,
        authorizer: Authorizer | None = None,
        expires_at: float = float("inf"),
        is_node: bool = False,
    ) -> None:
        self.authorizer = DENY_ALL if authorizer is None else authorizer
        self.principal = principal
        self.host = host
        self.listener = listener
        self.mechanism = mechanism
        self.expires_at = expires_at
        self.is_node = is_node
        self.renewal: Renewal | None = None
        self.writable = self.authorizer.grants()
        self.readable = self.authorizer.grants()

    def may(
        self,
        operation: AclOperation,
        resource_type: AclResourceType,
        name: str,
        *,
        audited: bool = True,
        api: str = "",
    ) -> bool:
        """Whether it may do something with a resource; ``audited`` and ``api`` as
        :meth:`Authorizer.allows`.
        """
        return self.authorizer.allows(
            self, operation, resource_type, name, audited=audited, api=api
        )

    def may_any(self, operation: AclOperation, resource_type: AclResourceType) -> bool:
        """Whether it may do something with at least one resource of a type."""
        return self.authorizer.allows_any(self, operation, resource_type)

    @property
    def is_unrestricted(self) -> bool:
        """Whether nothing is forbidden to whom it is, or to anybody."""
        return self.authorizer is ALLOW_ALL

    def operations(self, resource_type: AclResourceType, name: str) -> int:
        """What it may do with a resource, as ``authorized_operations`` has it: a bit for each
        operation. Nobody is told of the questions.
        """
        if self.is_unrestricted:
            return ALL_OPERATIONS[resource_type]
        return sum(
            1 << operation
            for operation in OPERATIONS[resource_type]
            if self.may(operation, resource_type, name, audited=False)
        )

    @property
    def user(self) -> str:
        """The name in the principal."""
        return self.principal.partition(":")[2]

    def __repr__(self) -> str:
        return f"<Session {self.principal} from {self.host} by {self.listener}>"


class Authorizer(Protocol):
    """Decides whether a session may do something. Pure: it asks the current image only."""

    def allows(
        self,
        session: Session,
        operation: AclOperation,
        resource_type: AclResourceType,
        name: str,
        *,
        audited: bool = True,
        api: str = "",
    ) -> bool:
        """Whether it may; ``audited``: a refusal is written to the audit log (filters are not), as
        one of ``api``.
        """

    def allows_any(
        self, session: Session, operation: AclOperation, resource_type: AclResourceType
    ) -> bool:
        """Whether it may on at least one resource of the type (``authorizeByResourceType``)."""

    def grants(self) -> Grants:
        """What is granted to a new session before anything is asked."""


class AllowAll:
    """The authorizer where none is set: whoever got in may do everything."""

    def allows(
        self,
        session: Session,  # noqa: ARG002
        operation: AclOperation,  # noqa: ARG002
        resource_type: AclResourceType,  # noqa: ARG002
        name: str,  # noqa: ARG002
        *,
        audited: bool = True,  # noqa: ARG002
        api: str = "",  # noqa: ARG002
    ) -> bool:
        """Yes."""
        return True

    def allows_any(
        self,
        session: Session,  # noqa: ARG002
        operation: AclOperation,  # noqa: ARG002
        resource_type: AclResourceType,  # noqa: ARG002
    ) -> bool:
        """Yes."""
        return True

    def grants(self) -> Grants:
        """Everything."""
        return ALL_GRANTED


class DenyAll(AllowAll):
    """The authorizer of a session that was given none: a bug of ours must not open a door."""

    def allows(self, *_: Any, **__: Any) -> bool:
        """No."""
        return False

    def allows_any(self, *_: Any) -> bool:
        """No."""
        return False

    def grants(self) -> Grants:
        """Nothing."""
        return set()


def node_session(listener: str) -> Session:
    """A session of a request of this node's own; addresses in its response are ``listener``'s."""
    return Session(listener=listener, authorizer=ALLOW_ALL, is_node=True)


ALL_GRANTED: Final = AllGranted()
ALLOW_ALL: Final = AllowAll()
ALL_OPERATIONS: Final = {
    kind: sum(1 << operation for operation in operations) for kind, operations in OPERATIONS.items()
}
DENY_ALL: Final = DenyAll()


def may_change_voters(between_nodes: bool, session: Session) -> bool:
    """Whether a request may change who votes on the metadata: through the listener between nodes,
    from this machine, or from whoever logged in where ACLs say who may alter the cluster.

    Whoever takes votes away can end the cluster for good, and a node without an authorizer lets
    everybody do everything; so it is not for all who reach a client's listener.
    """
    if between_nodes or (session.principal != ANONYMOUS and not session.is_unrestricted):
        return True
    try:
        return ip_address(session.host.strip("[]")).is_loopback
    except ValueError:
        return False
