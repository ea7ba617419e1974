"""Errors of five kinds; every error of kept is one of them.

============================  ====================================================================
:class:`PeerError`            the request or record is wrong; trying again will not help
:class:`RetriableError`       right request, wrong moment or place (not leader, fenced, too few
                              replicas); the peer refreshes and tries again
:class:`DamagedData`          bytes on disk or on the wire are not what they must be; always with
                              path, position and offset where there are any
:class:`MachineError`         the machine failed: EIO, ENOSPC; the log directory goes offline (but
                              not for :class:`ResourceExhausted`: it is tried again)
:class:`InvariantViolation`   our own bug
============================  ====================================================================

Leaf classes carry Kafka's name for the condition, so that ``kept.node.runtime.error_codes`` maps
them one to one. A message names the input and says what would be right.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Final, Self

DETAILS_IN_LOG: Final = "; the node's log has the details"
_SHORTAGES: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.ENOBUFS}
)


class KeptError(Exception):
    """Base of every error that kept raises on purpose."""

    @property
    def client_message(self) -> str:
        """The message as clients may have it: without paths of this machine."""
        return str(self)

    def without_frames(self) -> Self:
        """Itself, to be kept as a value: without its traceback and the error it came from. Their
        frames hold what they made, itself too, which then only the garbage collector would free.
        """
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self


class PeerError(KeptError):
    """The peer's fault; not retriable."""


class RetriableError(KeptError):
    """Retriable or fenced."""


class DamagedData(KeptError):
    """Damaged bytes in a file.

    ``path`` names the file, ``position`` the byte where the damaged thing starts (-1: unknown),
    ``offset`` the record offset it should hold (-1: unknown), ``why`` what is wrong with it.
    """

    def __init__(self, path: str, position: int, offset: int, why: str) -> None:
        at = f" at byte {position}" if position >= 0 else ""
        of = f" (offset {offset})" if offset >= 0 else ""
        super().__init__(f"{path}: damaged{at}{of}: {why}")
        self.path = path
        self.position = position
        self.offset = offset
        self.why = why

    @property
    def client_message(self) -> str:
        """See :attr:`KeptError.client_message`: the name of the file, without its directory."""
        return str(self).replace(self.path, self.path.rpartition("/")[2])


class MachineError(KeptError):
    """The operating system refused: disk full, I/O error, no such device.

    ``path`` is what was being worked on, ``operation`` the call, ``cause`` the OSError.
    """

    def __init__(self, path: str, operation: str, cause: OSError) -> None:
        message = f"{path}: {operation} failed: {cause.strerror or cause}"
        if cause.errno in (errno.EACCES, errno.EPERM):
            message += f" (this process is user {os.geteuid()}: make the directory that user's)"
        super().__init__(message)
        self.path = path
        self.operation = operation
        self.cause = cause

    @property
    def client_message(self) -> str:
        """See :attr:`KeptError.client_message`."""
        return f"{self.operation} failed: {_strerror(self.cause)}{DETAILS_IN_LOG}"

    def as_failure(self) -> MachineError:
        """The same as a failure of the disk, where something was left half done."""
        return self


class ResourceExhausted(MachineError):
    """The process or the machine has no descriptor or memory for the call (EMFILE, ENFILE, ENOMEM).

    Not said of a write, which may have been done in part (:meth:`kept.storage.disk.Disk.writev`).
    The disk is whole and the call changed nothing: what was to be done can be tried again, and no
    log directory goes offline. Clients are answered KAFKA_STORAGE_ERROR, which they retry.
    """

    def as_failure(self) -> MachineError:
        """See :meth:`MachineError.as_failure`."""
        return MachineError(self.path, self.operation, self.cause)


def vanished(path: str) -> MachineError:
    """What an open file was opened as, or held, is not there any more: its disk has failed."""
    why = "it was removed, moved, replaced or truncated while this node used it"
    return MachineError(path, "stat", FileNotFoundError(errno.ENOENT, why))


class InvariantViolation(KeptError):
    """A bug of kept: a state that must not exist."""


def is_device_error(error: BaseException) -> bool:
    """Whether a file call failed in a way that takes its log directory offline."""
    return isinstance(error, MachineError) and not isinstance(error, ResourceExhausted)


def is_shortage(error: MachineError) -> bool:
    """Whether only room was lacking, on the disk, within a limit or in memory: what can be left
    undone is.
    """
    return error.cause.errno in _SHORTAGES


def client_message(error: BaseException) -> str:
    """An error in words for clients: without paths, and of what nobody raises on purpose only its
    class. The node's log has the rest.
    """
    if isinstance(error, KeptError):
        return error.client_message
    kind = type(error).__name__
    why = f": {_strerror(error)}" if isinstance(error, OSError) else ""
    return f"{kind}{why}{DETAILS_IN_LOG}"


def _strerror(error: OSError) -> str:
    return error.strerror or type(error).__name__


def is_bug(error: BaseException) -> bool:
    """Whether an error shows a bug of ours: what nobody raises on purpose, or a state that must not
    exist. It is for the log with its traceback, whatever becomes of what it interrupted.
    """
    return isinstance(error, InvariantViolation) or not isinstance(error, KeptError | OSError)


# Records and batches (Produce).


class CorruptMessage(PeerError):
    """A batch whose framing, magic or CRC is wrong."""


class InvalidRecord(PeerError):
    """A batch that is whole but must not be appended.

    ``record_errors`` holds (index of the record in its batch, message) for those at fault.
    """

    def __init__(self, message: str, record_errors: Sequence[tuple[int, str]] = ()) -> None:
        super().__init__(message)
        self.record_errors = tuple(record_errors)


class InflatesBeyondLimit(InvalidRecord):
    """Records that inflate to more than they may, come in too many blocks for that, or are damaged
    where their codec cannot tell.

    ``told_bytes`` is what the stream itself says, where it does.
    """

    def __init__(self, message: str, told_bytes: int | None = None) -> None:
        super().__init__(message)
        self.told_bytes = told_bytes


class InvalidTimestamp(InvalidRecord):
    """A timestamp outside ``message.timestamp.before/after.max.ms``."""


class UnsupportedCompressionType(PeerError):
    """A codec that this version of Produce may not use, or that does not exist."""


class MessageTooLarge(PeerError):
    """A batch above ``max.message.bytes``."""


class RecordListTooLarge(PeerError):
    """A batch above ``segment.bytes``: no segment could hold it."""


class InvalidProducerEpoch(PeerError):
    """A producer epoch older than the one known."""


class OutOfOrderSequenceNumber(PeerError):
    """A sequence number that is not the next one."""


class UnknownProducerId(PeerError):
    """A producer id without state here whose first sequence is not 0."""


class InvalidTxnState(PeerError):
    """A batch and its producer's transactions do not agree: none is open, or one is."""


# Transactions.


class TransactionCoordinatorFenced(PeerError):
    """A marker from a coordinator that has been replaced."""


class InvalidProducerIdMapping(PeerError):
    """A producer id that is not that of the transactional id."""


class ConcurrentTransactions(RetriableError):
    """The end of the producer's last transaction is under way."""


class TransactionalIdAuthorizationFailed(PeerError):
    """A transactional id that may not be used, or that is missing."""


class OperationNotAttempted(PeerError):
    """Another part of the request is wrong."""


class ProducerFenced(PeerError):
    """Another instance of the producer has a newer epoch."""


class TransactionAbortable(PeerError):
    """The producer must abort its transaction, and may go on."""


# Reading.


class OffsetOutOfRange(PeerError):
    """An offset below the log start or above the log end."""


class OffsetNotAvailable(RetriableError):
    """The high watermark is not known in this epoch yet."""


class NotLeaderOrFollower(RetriableError):
    """This node does not host the partition in the role asked for."""


class FencedLeaderEpoch(RetriableError):
    """The peer's leader epoch is older than ours."""


class UnknownLeaderEpoch(RetriableError):
    """The peer's leader epoch is newer than ours."""


class UnknownTopicOrPartition(RetriableError):
    """No such topic or partition."""


class UnknownTopicId(RetriableError):
    """No such topic id."""


class InconsistentTopicId(RetriableError):
    """The topic of that name has another id."""


class KafkaStorageError(RetriableError):
    """The log directory of the partition is offline."""


class NotEnoughReplicas(RetriableError):
    """The ISR is below ``min.insync.replicas``; nothing was appended."""


class NotEnoughReplicasAfterAppend(RetriableError):
    """The ISR fell below ``min.insync.replicas`` after the append."""


class RequestTimedOut(RetriableError):
    """Not done within the request's timeout."""


class NoNode(KeptError):
    """Every address at which a cluster was looked for refuses connections."""


class NetworkException(RetriableError):
    """A node cannot be reached, or the connection broke before its answer."""


class NotController(RetriableError):
    """This node is not the active controller; ``leader_id`` is, if anybody is known (else -1)."""

    def __init__(self, message: str, leader_id: int = -1) -> None:
        super().__init__(message)
        self.leader_id = leader_id


class ReplicaNotAvailable(RetriableError):
    """No such replica here."""


# Administration.


class InvalidRequest(PeerError):
    """A request that contradicts itself or the protocol."""


class InvalidTopicException(PeerError):
    """A topic name that is not legal, or collides with another one."""


class TopicAlreadyExists(PeerError):
    """A topic of that name exists."""


class InvalidPartitions(PeerError):
    """A partition count that is not possible."""


class InvalidReplicationFactor(PeerError):
    """A replication factor that the cluster cannot serve."""


class InvalidReplicaAssignment(PeerError):
    """A manual assignment that is not possible."""


class InvalidConfig(PeerError):
    """A setting with an unknown name or an impossible value."""


class PolicyViolation(PeerError):
    """Legal in general, refused for this topic."""


class TopicDeletionDisabled(PeerError):
    """``delete.topic.enable`` is false."""


class ThrottlingQuotaExceeded(RetriableError):
    """A request beyond a quota of its client, which may come again ``throttle_ms`` later."""

    def __init__(self, message: str, throttle_ms: int = 0) -> None:
        super().__init__(message)
        self.throttle_ms = throttle_ms


class UnsupportedVersion(PeerError):
    """A version of an API that is not served."""


class UnsupportedSaslMechanism(PeerError):
    """A SASL mechanism that the listener does not enable."""


class IllegalSaslState(PeerError):
    """A SASL request that the state of the connection does not allow."""


class SaslAuthenticationFailed(PeerError):
    """The other side did not show that it is who it says, or broke the exchange."""


class UnacceptableCredential(PeerError):
    """A user's credential, or his name, is not one to be stored."""


class ResourceNotFound(PeerError):
    """What is to be described or deleted does not exist."""


class DuplicateResource(PeerError):
    """A request names something twice."""


class ClusterAuthorizationFailed(PeerError):
    """Not for whoever may reach this listener."""


class TopicAuthorizationFailed(PeerError):
    """Whoever asks may not do this with the topic, or may not know whether there is one."""


class SecurityDisabled(PeerError):
    """ACLs without an authorizer."""


# The controller.


class BrokerIdNotRegistered(PeerError):
    """No broker of that id is registered."""


class DuplicateBrokerRegistration(PeerError):
    """A live broker holds that id."""


class InconsistentClusterId(PeerError):
    """The request is meant for another cluster."""


class DuplicateVoter(InvalidRequest):
    """The node votes already."""


class VoterNotFound(InvalidRequest):
    """The node does not vote, or not from that disk."""


class StaleBrokerEpoch(RetriableError):
    """The broker was registered again since."""


class InvalidUpdateVersion(RetriableError):
    """The partition changed since: its partition epoch is another."""


class IneligibleReplica(RetriableError):
    """A replica that may not join the ISR: fenced, shutting down, or of an old broker epoch."""


class NoReassignmentInProgress(PeerError):
    """The partition is not being reassigned: there is nothing to cancel."""


class ElectionNotNeeded(PeerError):
    """The partition has the leader it should have."""


class PreferredLeaderNotAvailable(RetriableError):
    """The first replica is not alive and in the ISR."""


class EligibleLeadersNotAvailable(RetriableError):
    """No replica that may lead is alive."""


# Groups.


class CoordinatorNotAvailable(RetriableError):
    """The group's coordinator does not exist yet."""


class CoordinatorLoadInProgress(RetriableError):
    """The group's partition is being read."""


class NotCoordinator(RetriableError):
    """Another node coordinates the group."""


class InvalidGroupId(PeerError):
    """An empty or illegal group id."""


class GroupIdNotFound(PeerError):
    """No such group."""


class TransactionalIdNotFound(PeerError):
    """No such transactional id."""


class NonEmptyGroup(PeerError):
    """The group has members."""


class GroupSubscribedToTopic(PeerError):
    """A member of the group subscribes to that topic."""


# The node itself.


class ConfigurationError(KeptError):
    """Settings of the node that are unknown, out of range or contradict each other."""


class DirectoryInUse(KeptError):
    """A data directory that another process holds."""


class DirectoryRefused(KeptError):
    """A data directory that is another cluster's or node's, newer, or Apache Kafka's."""
