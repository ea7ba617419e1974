from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.tools.needs import need


@pytest.fixture(params=["python", "_kernel"], scope="session")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    """Each kernel in turn: one suite holds for both."""
    name = f"kept.storage.records.{request.param}"
    if request.param == "_kernel":
        need("kernels")
    return importlib.import_module(name)
