"""kept's errors as Kafka's error codes: the one place where they meet.

A class that is not listed takes the code of its nearest listed base, so that a new leaf class is
never answered with nothing. Names and numbers:
https://kafka.apache.org/protocol#protocol_error_codes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from kept.node.runtime.logging import bugs
from kept.storage import errors

NONE: Final = 0
UNKNOWN_SERVER_ERROR: Final = -1
OFFSET_OUT_OF_RANGE: Final = 1
CORRUPT_MESSAGE: Final = 2
UNKNOWN_TOPIC_OR_PARTITION: Final = 3
LEADER_NOT_AVAILABLE: Final = 5
NOT_LEADER_OR_FOLLOWER: Final = 6
REQUEST_TIMED_OUT: Final = 7
MESSAGE_TOO_LARGE: Final = 10
INVALID_TOPIC_EXCEPTION: Final = 17
RECORD_LIST_TOO_LARGE: Final = 18
NOT_ENOUGH_REPLICAS: Final = 19
INVALID_REQUIRED_ACKS: Final = 21
INVALID_TIMESTAMP: Final = 32
TOPIC_AUTHORIZATION_FAILED: Final = 29
UNSUPPORTED_SASL_MECHANISM: Final = 33
ILLEGAL_SASL_STATE: Final = 34
UNSUPPORTED_VERSION: Final = 35
INVALID_REQUEST: Final = 42
TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Final = 53
KAFKA_STORAGE_ERROR: Final = 56
SASL_AUTHENTICATION_FAILED: Final = 58
FETCH_SESSION_ID_NOT_FOUND: Final = 70
INVALID_FETCH_SESSION_EPOCH: Final = 71
FENCED_LEADER_EPOCH: Final = 74
UNKNOWN_TOPIC_ID: Final = 100
FETCH_SESSION_TOPIC_ID_ERROR: Final = 106

MAX_MESSAGE_LENGTH: Final = 2000
"""Characters of an error's message: a STRING of the protocol holds 32,767 bytes."""

_NAMES: Final[dict[str, int]] = {
    "KeptError": UNKNOWN_SERVER_ERROR,
    "PeerError": INVALID_REQUEST,
    "RetriableError": NOT_LEADER_OR_FOLLOWER,
    "DamagedData": KAFKA_STORAGE_ERROR,
    "MachineError": KAFKA_STORAGE_ERROR,
    "CorruptMessage": CORRUPT_MESSAGE,
    "InvalidRecord": 87,
    "InvalidTimestamp": INVALID_TIMESTAMP,
    "UnsupportedCompressionType": 76,
    "MessageTooLarge": MESSAGE_TOO_LARGE,
    "RecordListTooLarge": RECORD_LIST_TOO_LARGE,
    "InvalidProducerEpoch": 47,
    "OutOfOrderSequenceNumber": 45,
    "UnknownProducerId": 59,
    "InvalidTxnState": 48,
    "InvalidProducerIdMapping": 49,
    "ConcurrentTransactions": 51,
    "TransactionCoordinatorFenced": 52,
    "TransactionalIdAuthorizationFailed": TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    "OperationNotAttempted": 55,
    "ProducerFenced": 90,
    "TransactionAbortable": 120,
    "OffsetOutOfRange": OFFSET_OUT_OF_RANGE,
    "OffsetNotAvailable": 78,
    "NotLeaderOrFollower": NOT_LEADER_OR_FOLLOWER,
    "FencedLeaderEpoch": FENCED_LEADER_EPOCH,
    "UnknownLeaderEpoch": 75,
    "UnknownTopicOrPartition": UNKNOWN_TOPIC_OR_PARTITION,
    "UnknownTopicId": UNKNOWN_TOPIC_ID,
    "InconsistentTopicId": 103,
    "KafkaStorageError": KAFKA_STORAGE_ERROR,
    "NotEnoughReplicas": NOT_ENOUGH_REPLICAS,
    "NotEnoughReplicasAfterAppend": 20,
    "RequestTimedOut": REQUEST_TIMED_OUT,
    "NetworkException": 13,
    "NotController": 41,
    "ReplicaNotAvailable": 9,
    "InvalidRequest": INVALID_REQUEST,
    "InvalidTopicException": INVALID_TOPIC_EXCEPTION,
    "TopicAlreadyExists": 36,
    "InvalidPartitions": 37,
    "InvalidReplicationFactor": 38,
    "InvalidReplicaAssignment": 39,
    "InvalidConfig": 40,
    "PolicyViolation": 44,
    "TopicDeletionDisabled": 73,
    "ThrottlingQuotaExceeded": 89,
    "UnsupportedVersion": UNSUPPORTED_VERSION,
    "UnsupportedSaslMechanism": UNSUPPORTED_SASL_MECHANISM,
    "IllegalSaslState": ILLEGAL_SASL_STATE,
    "SaslAuthenticationFailed": SASL_AUTHENTICATION_FAILED,
    "ClusterAuthorizationFailed": 31,
    "TopicAuthorizationFailed": TOPIC_AUTHORIZATION_FAILED,
    "SecurityDisabled": 54,
    "CoordinatorNotAvailable": 15,
    "CoordinatorLoadInProgress": 14,
    "NotCoordinator": 16,
    "InvalidGroupId": 24,
    "GroupIdNotFound": 69,
    "TransactionalIdNotFound": 105,
    "NonEmptyGroup": 68,
    "GroupSubscribedToTopic": 86,
    "UnknownMemberId": 25,
    "IllegalGeneration": 22,
    "InconsistentGroupProtocol": 23,
    "InvalidSessionTimeout": 26,
    "RebalanceInProgress": 27,
    "MemberIdRequired": 79,
    "GroupMaxSizeReached": 81,
    "FencedInstanceId": 82,
    "OffsetMetadataTooLarge": 12,
    "ResourceNotFound": 91,
    "DuplicateResource": 92,
    "UnacceptableCredential": 93,
    "ReassignmentInProgress": 60,
    "NoReassignmentInProgress": 85,
    "ElectionNotNeeded": 84,
    "PreferredLeaderNotAvailable": 80,
    "EligibleLeadersNotAvailable": 83,
    "UnsupportedForMessageFormat": 43,
    "StaleBrokerEpoch": 77,
    "BrokerIdNotRegistered": 102,
    "InconsistentClusterId": 104,
    "DuplicateVoter": 126,
    "VoterNotFound": 127,
}


@cache
def _class_code(kind: type[BaseException]) -> int:
    for base in kind.__mro__:
        code = _NAMES.get(base.__name__)
        if code is not None and issubclass(base, errors.KeptError):
            return code
    return UNKNOWN_SERVER_ERROR


def code_for(error: BaseException, event: str = "internal error", **fields: Any) -> int:
    """Kafka's error code for an error; -1 (UNKNOWN_SERVER_ERROR) for one that has none, and for a
    bug of ours. The log has such an error as ``event`` with the ``fields`` and its traceback, each
    but once in :data:`.logging.BUG_INTERVAL_S`: callers need not log it.
    """
    code = _class_code(type(error))  # type: ignore[arg-type]
    if code == UNKNOWN_SERVER_ERROR or errors.is_bug(error):
        bugs.report(event, error, **fields)
    return code


def shortened(text: str) -> str:
    """``text`` as a message of an answer, which names what a client sent, of whatever length."""
    if len(text) <= MAX_MESSAGE_LENGTH:
        return text
    return f"{text[:MAX_MESSAGE_LENGTH]}... ({len(text)} characters)"


def message_for(error: BaseException) -> str:
    """What to tell the peer: an error's own words but for paths of this machine, and only a general
    line for our own bugs.
    """
    if isinstance(error, errors.KeptError) and not errors.is_bug(error):
        return shortened(error.client_message)
    return "internal error; the node's log has the details"


def error_values(error: BaseException | None) -> dict[str, Any]:
    """The fields ``error_code`` and ``error_message`` of a response; no error is 0 and null."""
    if error is None:
        return {"error_code": NONE, "error_message": None}
    return {"error_code": code_for(error), "error_message": message_for(error)}
