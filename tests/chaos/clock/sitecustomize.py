"""A wall clock that can be set from outside, in the process of a node under test.

Python imports this by itself from PYTHONPATH. ``time.time`` is so many seconds ahead as the file
that KEPT_TEST_CLOCK names says; it is looked at once a second. Other clocks stay as they are.
"""

import os
import time

_REAL, _MONOTONIC = time.time, time.monotonic
_FILE = os.environ.pop("KEPT_TEST_CLOCK", "")
_ahead, _looked = 0.0, float("-inf")


def _time() -> float:
    global _ahead, _looked
    if _MONOTONIC() - _looked > 1.0:
        _looked = _MONOTONIC()
        try:
            with open(_FILE) as file:
                _ahead = float(file.read() or 0)
        except FileNotFoundError:
            _ahead = 0.0
    return _REAL() + _ahead


if _FILE:
    time.time = _time
