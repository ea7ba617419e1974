"""What tests fetch is fetched by one of them, and is there whole or not at all."""

from __future__ import annotations

import fcntl
import threading

import pytest

from tests.tools.fetched import once


def test_one_process_fetches_while_the_others_are_locked_out(tmp_path) -> None:
    place = tmp_path / "cache" / "jars"

    def make(made) -> None:
        assert not place.exists() and not list(made.iterdir())
        with (place.parent / ".lock").open("w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (made / "a.jar").write_bytes(b"a")

    assert once(place, make) == place
    assert once(place, pytest.fail) == place
    assert [path.name for path in place.iterdir()] == ["a.jar"]


def test_who_waited_takes_what_the_other_fetched(tmp_path) -> None:
    place = tmp_path / "jars"
    makers: list[object] = []
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=once, args=(place, makers.append))
        waiting.start()
        place.mkdir()
    waiting.join()
    assert makers == []


def test_nothing_is_left_of_a_fetch_that_failed(tmp_path) -> None:
    def make(made) -> None:
        (made / "half.jar").write_bytes(b"a")
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        once(tmp_path / "jars", make)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
