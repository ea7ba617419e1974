"""What goes wrong on the node's machine is told to clients without a path of it."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from kept.node.grpc.status_codes import end_with
from kept.node.http.messages import failure_of
from kept.node.runtime.error_codes import message_for
from kept.storage.errors import DamagedData, KeptError, MachineError, ResourceExhausted

DIRECTORY = "/var/lib/private-place/log"
FILE = f"{DIRECTORY}/orders-0/00000000000000000007.log"
ERRORS = [
    (MachineError(FILE, "pread", OSError(errno.EIO, "Input/output error")), "pread failed: Input/"),
    (MachineError(FILE, "open", PermissionError(errno.EACCES, "Permission denied")), "Permission"),
    (ResourceExhausted(FILE, "open", OSError(errno.EMFILE, "Too many open files")), "Too many"),
    (DamagedData(FILE, 17, 7, "the CRC does not match"), "damaged at byte 17"),
]


def told_by_kafka(error: KeptError) -> str:
    return message_for(error)


def told_by_http(error: KeptError) -> str:
    told: Any = failure_of(error).value
    return str(told["error"]["message"])


def told_by_grpc(error: KeptError) -> str:
    class Ended(Exception):
        pass

    class Context:
        async def abort(self, _status: Any, message: str, _trailing: Any) -> None:
            raise Ended(message)

    with pytest.raises(Ended) as ended:
        asyncio.run(end_with(Context(), error))
    return str(ended.value)


@pytest.mark.parametrize("face", [told_by_kafka, told_by_http, told_by_grpc])
@pytest.mark.parametrize(("error", "why"), ERRORS)
def test_a_reason_is_told_without_a_path(face: Any, error: KeptError, why: str) -> None:
    told = face(error)
    assert why in told
    assert DIRECTORY not in told and "orders-0" not in told and str(error).startswith(FILE)
