"""The audit log: who was denied what, who changed what, and which logins were refused.

One JSON object a line, on stderr or in a file of its own. Equal denials within ten seconds are two
lines at most: the first at once, and the others as one line with their ``count`` when the ten
seconds are over, so that a client that tries again and again does not fill a disk. Of more
than 4,096 different ones in ten seconds the rest are only counted.

What is asked only to filter an answer, or to tell what is allowed, is not recorded (as in Kafka).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import Struct, structs

from kept.node.runtime.logging import log
from kept.storage.errors import KeptError
from kept.storage.printable import printable_text

if TYPE_CHECKING:
    from kept.cluster.security.acls import AclBinding
    from kept.node.runtime.runtime import Runtime
    from kept.node.security.authorizer import AccessEvent
    from kept.node.security.session import Session
    from kept.storage.disk import File

WINDOW_MS: Final = 10_000
"""Equal denials within so long are counted, not repeated."""
MAX_WINDOWS: Final = 4096
"""Different denials that are remembered at a time."""
WINDOWS_AT_ONCE: Final = 64
"""So many are ended in one turn of the loop: a millisecond's work."""
MAX_SHOWN: Final = 256
"""Characters of a name, or of what was asked, that a line has: strangers may send a megabyte, and
each is remembered for a window."""
MAX_WAITING: Final = 16_384
"""Lines that wait for the disk; those beyond are dropped, and counted."""

E = TypeVar("E", bound=Hashable)


class LoginRefused(Struct, frozen=True):
    """Somebody did not get in. ``user`` is None where there is none of that name: people type
    passwords there.
    """

    host: str
    listener: str
    mechanism: str
    user: str | None


class RepeatedEvents(Generic[E]):
    """Counts equal events within a window of time. Pure; time never goes back."""

    def __init__(self, window_ms: int = WINDOW_MS, max_windows: int = MAX_WINDOWS) -> None:
        self._window_ms = window_ms
        self._max_windows = max_windows
        self._repeats: dict[E, int] = {}
        """How often each came after the first, in the order in which their windows end."""
        self._ends: dict[E, int] = {}
        self._others = 0

    def is_first(self, event: E, now_ms: int) -> bool:
        """Whether to record the event now; else it is counted."""
        if event in self._repeats:
            self._repeats[event] += 1
            return False
        if len(self._repeats) >= self._max_windows:
            self._others += 1
            return False
        self._repeats[event] = 0
        self._ends[event] = now_ms + self._window_ms
        return True

    def next_end_ms(self) -> int | None:
        """When the next window ends; None if none is open."""
        return next(iter(self._ends.values()), None)

    def ended(self, now_ms: float, most: int) -> list[tuple[E | None, int]]:
        """Events whose window has ended and that came again in it, with how often, of ``most``
        windows; None stands for those that found no room.
        """
        repeated: list[tuple[E | None, int]] = []
        for event, end_ms in [*islice(self._ends.items(), most)]:
            if end_ms > now_ms:
                break
            del self._ends[event]
            if count := self._repeats.pop(event):
                repeated.append((event, count))
        if self._others and len(self._repeats) < self._max_windows:
            repeated.append((None, self._others))
            self._others = 0
        return repeated


class AuditLog:
    """Writes the audit log. ``mode``: off, denied (with refused logins and changes), or all."""

    def __init__(self, runtime: Runtime, node_id: int, mode: str, path: str | None = None) -> None:
        self.records_allowed = mode == "all"
        self.is_on = mode != "off"
        self._runtime = runtime
        self._node_id = node_id
        self._repeated: RepeatedEvents[AccessEvent | LoginRefused] = RepeatedEvents()
        self._timer: asyncio.TimerHandle | None = None
        self._file = None if path is None else AuditFile(runtime, path)

    def decided(self, event: AccessEvent) -> None:
        """Something was denied or allowed."""
        if not self.is_on:
            return
        event = structs.replace(event, api=_shown(event.api), name=_shown(event.name))
        if event.ruling.allowed:
            self._write(_access(event, 1))
        else:
            self._count(event)

    def login_refused(self, host: str, listener: str, mechanism: str, user: str | None) -> None:
        """A login failed."""
        if self.is_on:
            self._count(LoginRefused(host, listener, mechanism, user))

    def changed(self, session: Session, api: str, names: Sequence[str]) -> None:
        """Something was changed by this node as controller: names, never values."""
        if self.is_on:
            speaker = {
                "principal": session.principal,
                "host": session.host,
                "listener": session.listener,
                "mechanism": session.mechanism,
            }
            self._write({"event": "change", **speaker, "api": api, "names": [*names]})

    def reopen(self) -> None:
        """Open the file anew: it was renamed."""
        if self._file is not None:
            self._file.reopen()

    async def close(self) -> None:
        """Write what was counted, and wait until the file has it."""
        if self._timer is not None:
            self._timer.cancel()
        while self._repeated.next_end_ms() is not None:
            self._write_ended(float("inf"))
        if self._file is not None:
            await self._file.drain()

    def _count(self, event: AccessEvent | LoginRefused) -> None:
        """Write what is new, and count what is not."""
        now_ms = self._now_ms()
        if self._repeated.is_first(event, now_ms):
            self._write(_refused(event, 1))
        if self._timer is None:
            self._wait(now_ms)

    def _now_ms(self) -> int:
        return int(self._runtime.loop.time() * 1000)

    def _wait(self, now_ms: int) -> None:
        end_ms = self._repeated.next_end_ms()
        self._timer = None
        if end_ms is not None:
            delay = max(end_ms - now_ms, 0) / 1000
            self._timer = self._runtime.loop.call_later(delay, self._windows_ended)

    def _windows_ended(self) -> None:
        now_ms = self._now_ms()
        self._write_ended(now_ms)
        self._wait(now_ms)

    def _write_ended(self, now_ms: float) -> None:
        for event, count in self._repeated.ended(now_ms, WINDOWS_AT_ONCE):
            if event is None:
                self._write({"event": "others", "outcome": "denied", "count": count})
            else:
                self._write(_refused(event, count))

    def _write(self, fields: Mapping[str, Any]) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        entry = {"time": f"{stamp}.{int(now * 1e3) % 1000:03}Z", "node": self._node_id, **fields}
        line = printable_text(json.dumps(entry, ensure_ascii=False)) + "\n"
        if self._file is not None:
            self._file.write(line)
        else:
            sys.stderr.write(line)
            sys.stderr.flush()


class AuditFile:
    """Lines at the end of a file of mode 0600. It is written in a thread, so that a disk that hangs
    holds nobody up; lines beyond what may wait for it are counted and dropped.
    """

    def __init__(self, runtime: Runtime, path: str) -> None:
        self._runtime = runtime
        self._path = path
        self._file: File | None = None
        self._is_renamed = False
        """Whether it is to be opened anew since the job began, whose file has lost the name."""
        self._waiting: list[str] = []
        self._dropped = 0
        self._job: asyncio.Future[File] | None = None

    def write(self, line: str) -> None:
        """Append a line, soon."""
        if len(self._waiting) >= MAX_WAITING:
            self._dropped += 1
            return
        self._waiting.append(line)
        self._flush()

    def reopen(self) -> None:
        """Lines from now on go to the file that then has the name."""
        self._file = None
        self._is_renamed = True

    async def drain(self) -> None:
        """Wait until all lines are written, or have failed."""
        while self._job is not None:
            await asyncio.wait((self._job,))

    def _flush(self) -> None:
        if self._job is not None or not self._waiting:
            return
        data = "".join(self._waiting).encode(errors="backslashreplace")
        self._waiting.clear()
        self._is_renamed = False
        self._job = self._runtime.in_thread(self._append, self._file, data)
        self._job.add_done_callback(self._flushed)

    def _append(self, file: File | None, data: bytes) -> File:
        disk = self._runtime.disk
        if file is None:
            file = disk.open_append(self._path)
        disk.writev(file, [data], disk.size(file))
        return file

    def _flushed(self, appended: asyncio.Future[File]) -> None:
        self._job = None
        if appended.cancelled():
            pass
        elif (error := appended.exception()) is not None:
            if not isinstance(error, KeptError):
                raise error
            log.error("the audit log was not written", path=self._path, why=str(error))
            self._file = None
        elif not self._is_renamed:
            self._file = appended.result()
        if self._dropped:
            log.error("lines of the audit log were dropped", path=self._path, lines=self._dropped)
            self._dropped = 0
        self._flush()


def _shown(text: str) -> str:
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[:MAX_SHOWN]}… ({len(text)} characters)"


def _refused(event: AccessEvent | LoginRefused, count: int) -> Mapping[str, Any]:
    if isinstance(event, LoginRefused):
        return {
            "event": "login",
            "outcome": "refused",
            "principal": None if event.user is None else f"User:{event.user}",
            "host": event.host,
            "listener": event.listener,
            "mechanism": event.mechanism,
            "count": count,
        }
    return _access(event, count)


def _access(event: AccessEvent, count: int) -> Mapping[str, Any]:
    return {
        "event": "access",
        "outcome": "allowed" if event.ruling.allowed else "denied",
        "principal": event.principal,
        "host": event.host,
        "listener": event.listener,
        "mechanism": event.mechanism,
        "api": event.api,
        "operation": event.operation.name,
        "resource_type": event.resource_type.name,
        "resource": event.name,
        "pattern": "LITERAL",
        "rule": event.ruling.rule.value,
        "binding": None if event.ruling.binding is None else _binding(event.ruling.binding),
        "count": count,
    }


def _binding(binding: AclBinding) -> Mapping[str, str]:
    return {
        "resource_type": binding.resource_type.name,
        "resource": binding.name,
        "pattern": binding.pattern.name,
        "principal": binding.principal,
        "host": binding.host,
        "operation": binding.operation.name,
        "permission": binding.permission.name,
    }
