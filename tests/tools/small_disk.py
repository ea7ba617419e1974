"""A file system with little room, which a test can fill."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.tools.needs import cannot_run

SIZE_BYTES = 3 << 20


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A new directory at ``path`` on a file system of 3 MiB. Needs the right to mount."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "kept-test", str(path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        cannot_run("small_disk", f"no small file system: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
