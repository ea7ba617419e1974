"""A browser for the tests of a module."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def chromium():
    from tests.console import browser

    with browser.chromium() as found:
        yield found
