"""Large blocks that a thread frees do not stay with it."""

from __future__ import annotations

import ctypes

from kept.node.runtime import malloc
from tests.support.given import Given


def test_it_is_asked_for_once_where_there_is_such_a_call(monkeypatch) -> None:
    calls: list[tuple[int, int]] = []
    for library in (Given(mallopt=lambda *given: calls.append(given)), Given()):
        monkeypatch.setattr(ctypes, "CDLL", lambda _, library=library: library)
        malloc.return_large_blocks.cache_clear()
        malloc.return_large_blocks()
        malloc.return_large_blocks()
    assert calls == [(-3, 2 << 20)]
    malloc.return_large_blocks.cache_clear()
