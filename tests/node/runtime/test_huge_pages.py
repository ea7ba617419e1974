"""The heap in huge pages."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from kept.node.runtime import huge_pages
from kept.node.runtime.huge_pages import HUGE_BYTES
from tests.support.given import Given

SCRIPT = """
import re
from kept.node.runtime.huge_pages import collapse_heap

def huge_kb():
    return int(re.search(r"AnonHugePages: +([0-9]+)", open("/proc/self/smaps_rollup").read())[1])

held = [bytes(400) for _ in range(50_000)]
before = huge_kb()
print(collapse_heap(), before, huge_kb(), sum(map(len, held)))
"""


def test_what_is_told_is_what_the_system_counts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=60
    )
    pages, before_kb, after_kb, held = map(int, done.stdout.split())
    assert held == 400 * 50_000
    assert before_kb <= after_kb <= before_kb + pages * HUGE_BYTES // 1024
    if not _system_has_none():
        assert pages and after_kb >= pages * HUGE_BYTES // 1024


def _system_has_none() -> bool:
    """Whether this system makes none when it is asked."""
    import mmap

    if huge_pages._are_forbidden():
        return True
    with mmap.mmap(-1, 2 * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = b"x" * len(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        at = -(-address // HUGE_BYTES) * HUGE_BYTES
        return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE_BYTES), 25))


def setting(tmp_path: Path, text: str) -> Path:
    """The file with the machine's setting."""
    path = tmp_path / "enabled"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("mapping", "asked"),
    [
        ((0, 2, 2), [0, 1]),
        ((0.5, 3.5, 3), [1, 2]),
        ((0.5, 2.4, 1.9), [1]),
        ((0.5, 1.5, 1), []),
        ((0, 4, 2.9), []),  # a thread's stack
    ],
)
def test_whole_pages_of_what_is_used_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mapping: tuple[float, float, float],
    asked: list[int],
) -> None:
    """Of mappings from, to, and so much in memory, in huge pages."""
    calls: list[tuple[int, int, int]] = []

    def madvise(at: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
        calls.append(((at.value or 0) // HUGE_BYTES, size.value, advice))
        return 0

    given = tuple(int(part * HUGE_BYTES) for part in mapping)
    monkeypatch.setattr(huge_pages, "_mappings", lambda: [given])
    monkeypatch.setattr(huge_pages, "ENABLED", str(setting(tmp_path, "always [madvise] never\n")))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Given(madvise=madvise))
    assert huge_pages.collapse_heap() == len(asked)
    assert calls == [(page, HUGE_BYTES, 25) for page in asked]
    setting(tmp_path, "always madvise [never]\n")
    assert huge_pages.collapse_heap() == 0
    monkeypatch.setattr(huge_pages, "ENABLED", "/not/there")
    assert huge_pages.collapse_heap() == 0
    assert len(calls) == len(asked)


def test_where_it_cannot_be_asked_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Given())
    assert huge_pages.collapse_heap() == 0
    monkeypatch.setitem(sys.modules, "ctypes", None)
    assert huge_pages.collapse_heap() == 0
