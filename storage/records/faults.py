"""Why a record is refused. Both kernels report these numbers; the words are only here."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from kept.storage.errors import InvalidRecord, InvalidTimestamp


class Fault(IntEnum):
    """What is wrong with one record. Above SEMANTIC the walk can go on to the next record."""

    MISSING = 1
    VARINT = 2
    LENGTH = 3
    FIELD = 4
    HEADERS = 5
    SIZE = 6
    TRAILING = 7
    SEMANTIC = 16
    OFFSET_DELTA = 17
    NO_KEY = 18
    TIMESTAMP = 19


REASONS: Final = {
    Fault.MISSING: "the batch ends before this record",
    Fault.VARINT: "a variable-length number is cut off or too long",
    Fault.LENGTH: "its length is impossible",
    Fault.FIELD: "a key or value does not fit into the record",
    Fault.HEADERS: "its headers do not fit into the record",
    Fault.SIZE: "its fields do not fill its length",
    Fault.TRAILING: "bytes follow the last record",
    Fault.OFFSET_DELTA: "its offset delta is not its index in the batch",
    Fault.NO_KEY: "a compacted topic does not accept a record without a key",
}


def refusal(faults: Sequence[tuple[int, int, int]], earliest: int, latest: int) -> InvalidRecord:
    """The error for (index, fault, timestamp) of each faulty record.

    InvalidTimestamp when any of them is about a timestamp, as in Kafka's LogValidator.
    """
    errors = []
    about_time = False
    for index, fault, timestamp in faults:
        if fault == Fault.TIMESTAMP:
            about_time = True
            errors.append((index, f"timestamp {timestamp} is outside {earliest}..{latest}"))
        else:
            errors.append((index, REASONS[Fault(fault)]))
    index, reason = errors[0]
    message = f"record {index}: {reason}"
    if len(errors) > 1:
        message += f" (and {len(errors) - 1} more)"
    return (InvalidTimestamp if about_time else InvalidRecord)(message, errors)
