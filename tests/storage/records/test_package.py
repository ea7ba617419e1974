from __future__ import annotations

import os
import subprocess
import sys

from kept.storage import records
from tests.tools.needs import need


def kernel_with(environment: str) -> str:
    code = (
        "import kept.storage.records as r; print(r.KERNEL, r.check.__module__, r.scan.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KEPT_KERNEL": environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_environment_forces_the_python_kernel() -> None:
    name = "kept.storage.records.python"
    assert kernel_with("python") == f"python {name} {name}"


def test_the_compiled_kernel_is_the_default() -> None:
    need("kernels")
    name = "kept.storage.records._kernel"
    assert kernel_with("") == f"cython {name} {name}"


def test_codecs_are_imported_when_they_are_used() -> None:
    code = (
        "import sys, kept.storage.records\n"
        "print([name for name in ('lz4', 'zstandard', 'cramjam', 'crc32c') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in records.__all__:
        assert getattr(records, name) is not None
