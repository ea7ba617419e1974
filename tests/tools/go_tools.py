"""Programs in Go that tests run: tools from their modules, a client made from ``broker.proto``, and
clients of Kafka.

Each is built once into a cache (``GO_TOOLS_CACHE``, else ``~/.cache/kept/go``), named with its
version. Needs Go 1.23.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRPCURL = "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3"
PROTOC_GEN_GO = "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.5"
PROTOC_GEN_GO_GRPC = "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.5.1"
BUILD_SECONDS = 900


def cache() -> Path:
    """Where the programs are, or will be."""
    given = os.environ.get("GO_TOOLS_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "kept" / "go"


def _run(command: list[str], cwd: Path, **environ: str) -> None:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} failed:\n{done.stderr[-4000:]}")


def _placed(built: Path, name: str) -> Path:
    """Move a program into the cache at once, whoever else does so, too."""
    target = cache() / name
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copy2(built, beside)
    beside.replace(target)
    return target


def tool(module: str) -> Path:
    """A program by its module, ``path@version``."""
    path, _, version = module.partition("@")
    name = path.rpartition("/")[2]
    found = cache() / f"{name}-{version}"
    if found.exists():
        return found
    with tempfile.TemporaryDirectory(prefix="kept-go-") as folder:
        _run(["go", "install", module], Path(folder), GOBIN=folder)
        return _placed(Path(folder) / name, found.name)


def client() -> Path:
    """The program of ``tests/grpc/go``, with code generated from ``node/proto/broker.proto``."""
    sources = [*sorted((ROOT / "tests/grpc/go").iterdir()), ROOT / "node/proto/broker.proto"]
    return _built("broker-client", sources, generate)


def kafka_clients() -> Path:
    """The program of ``tests/compat/go``, which has clients of Kafka in it."""
    return _built("kafka-clients", sorted((ROOT / "tests/compat/go").iterdir()))


def _built(
    name: str, sources: Sequence[Path], prepare: Callable[[Path], None] | None = None
) -> Path:
    """A program from its sources, after ``prepare`` in the folder where they are."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    found = cache() / f"{name}-{digest}"
    if found.exists():
        return found
    with tempfile.TemporaryDirectory(prefix="kept-go-") as root:
        folder = Path(root)
        for source in sources:
            shutil.copy(source, folder)
        if prepare is not None:
            prepare(folder)
        _run(["go", "build", "-o", name, "."], folder)
        return _placed(folder / name, found.name)


def generate(folder: Path) -> None:
    """``folder/broker.proto`` to ``folder/broker/*.go``."""
    (folder / "broker").mkdir()
    options = [
        f"--plugin=protoc-gen-go={tool(PROTOC_GEN_GO)}",
        f"--plugin=protoc-gen-go-grpc={tool(PROTOC_GEN_GO_GRPC)}",
    ]
    for language in ("go", "go-grpc"):
        options += [f"--{language}_out=broker", f"--{language}_opt=paths=source_relative"]
    _run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *options, "broker.proto"], folder)
