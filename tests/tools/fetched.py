"""What tests fetch once: directories in a cache that all test processes of a user share."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable
from pathlib import Path


def once(place: Path, make: Callable[[Path], None]) -> Path:
    """The directory ``place``, which ``make`` fills (it is given an empty one beside it).

    It is there whole or not at all, and one process makes it while others wait: Maven's own
    repository and its like are not made for two that fetch the same. Raises what ``make`` raises.
    """
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with (place.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                with tempfile.TemporaryDirectory(dir=place.parent) as work:
                    made = Path(work) / "made"
                    made.mkdir()
                    make(made)
                    made.rename(place)
    return place
