from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture(params=["python", "_kernel"], scope="session")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    """Each kernel in turn: one suite holds for both."""
    name = f"kept.storage.records.{request.param}"
    if request.param == "_kernel":
        return pytest.importorskip(name, reason="the compiled kernel is not built")
    return importlib.import_module(name)
