"""Makes the wheels that a registry takes: one per platform, all on this machine.

    python release/wheels.py SDIST [--into DIR] [--platform NAME ...]

The source archive is unpacked and built once per platform of :data:`TARGETS` with ``zig cc``,
which comes as a Python package with the headers of every glibc and musl. Of Python it needs the
headers of the one that runs this, with ``pyconfig.h`` of this folder in place of theirs, since a
kernel uses Python's limited API alone (docs/adr/0015-one-wheel-for-every-python.md). Each wheel is
then judged: by ``auditwheel`` (does it run on what its name says?), by ``abi3audit`` (does it use
the stable ABI alone?), by ``twine``, and for debug symbols. The dependency group ``release`` has
these programs. Ends with status 1 and the reason when a wheel does not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
TARGETS: Final = {
    "manylinux2014_x86_64": "x86_64-linux-gnu.2.17",
    "manylinux2014_aarch64": "aarch64-linux-gnu.2.17",
    "musllinux_1_2_x86_64": "x86_64-linux-musl",
    "musllinux_1_2_aarch64": "aarch64-linux-musl",
}
"""A wheel's platform, and zig's name for what it is compiled for."""
ALSO_NAMED: Final = {"manylinux2014": "manylinux_2_17"}
"""auditwheel's names (PEP 600) of platforms that have an older one, which every pip knows."""
BUILD: Final = "from setuptools import build_meta; build_meta.build_wheel({into!r})"
DEBUG_SECTION: Final = b".debug_info"


class WheelRefused(Exception):
    """A wheel is not what its name says, or does not build."""


def main() -> int:
    """Build and judge; the exit status."""
    arguments = argparse.ArgumentParser(description="Makes the wheels that a registry takes.")
    arguments.add_argument("sdist", type=Path, help="the source archive")
    arguments.add_argument("--into", type=Path, default=Path("dist"))
    arguments.add_argument("--platform", action="append", choices=list(TARGETS))
    given = arguments.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="kept-wheels-") as scratch:
            tree = unpacked(given.sdist, Path(scratch))
            headers = headers_for_all(Path(scratch) / "headers")
            for platform in given.platform or TARGETS:
                wheel = build(tree, headers, platform, Path(scratch) / platform)
                judge(wheel, platform)
                shutil.copy(wheel, given.into)
                print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)
    except WheelRefused as refusal:
        print(f"wheels: {refusal}", file=sys.stderr)
        return 1
    return 0


def unpacked(sdist: Path, into: Path) -> Path:
    """The one folder of a source archive. Raises WheelRefused if that is not what it has."""
    # Not tarfile: Python 3.11 has had its filters since 3.11.4, and Debian 12 has 3.11.2.
    done = subprocess.run(["tar", "-xf", sdist, "-C", into], capture_output=True, check=False)
    folders = list(into.iterdir())
    if done.returncode or len(folders) != 1 or not (folders[0] / "pyproject.toml").exists():
        raise WheelRefused(f"{sdist} is no source archive: it has no one folder of a project")
    return folders[0]


def headers_for_all(into: Path) -> Path:
    """This Python's headers, with a ``pyconfig.h`` that holds for every platform."""
    shutil.copytree(sysconfig.get_path("include"), into)
    shutil.copy(HERE / "pyconfig.h", into)
    return into


def build(tree: Path, headers: Path, platform: str, into: Path) -> Path:
    """The wheel of ``tree`` for a platform. Raises WheelRefused if it does not build."""
    shutil.rmtree(tree / "build", ignore_errors=True)  # objects of another platform
    into.mkdir()
    options = into / "options.cfg"
    options.write_text(
        f"[build_ext]\nparallel = {os.cpu_count()}\ninclude_dirs = {headers}\n"
        f"[bdist_wheel]\nplat_name = {platform}\n"
    )
    compiler = f"{sys.executable} -m ziglang cc -target {TARGETS[platform]}"
    environ = {
        **os.environ,
        "CC": compiler,
        "CFLAGS": "-O3 -g0 -Wno-unused-function",
        "LDSHARED": f"{compiler} -O3 -shared -s",
        "DIST_EXTRA_CONFIG": str(options),
        "KEPT_REQUIRE_KERNELS": "1",
    }
    log = into / "log"
    with log.open("w") as out:
        command = [sys.executable, "-c", BUILD.format(into=str(into))]
        done = subprocess.run(
            command, cwd=tree, env=environ, stdout=out, stderr=subprocess.STDOUT, check=False
        )
    made = list(into.glob("*.whl"))
    if done.returncode or len(made) != 1:
        end = "\n".join(log.read_text().splitlines()[-40:])
        raise WheelRefused(f"{platform} does not build:\n{end}")
    if platform.startswith("musllinux"):
        name_libc(made[0], platform.rpartition("_1_2_")[2])
    return made[0]


def name_libc(wheel: Path, machine: str) -> None:
    """Have the kernels need libc by the name that musl's distributions and auditwheel know.

    zig links them with ``libc.so``, which musl's loader takes for itself as well.
    """
    with tempfile.TemporaryDirectory(prefix="kept-wheel-") as scratch:
        _output("wheel", "unpack", "--dest", scratch, str(wheel))
        (tree,) = Path(scratch).iterdir()
        for kernel in tree.rglob("*.so"):
            musl = f"libc.musl-{machine}.so.1"
            _output("patchelf", "--replace-needed", "libc.so", musl, str(kernel))
        _output("wheel", "pack", "--dest-dir", str(wheel.parent), str(tree))


def judge(wheel: Path, platform: str) -> None:
    """Raises WheelRefused unless every judge passes the wheel for this platform."""
    # Libraries of this machine say nothing about another's.
    said = _output("auditwheel", "show", "--json", "--ldpaths", os.devnull, str(wheel))
    found = json.loads(said)
    family, _, rest = platform.partition("_")
    wanted = {platform, f"{ALSO_NAMED.get(family, family)}_{rest}"}
    if found["overall_tag"] not in wanted or found["external_libs"]:
        raise WheelRefused(f"auditwheel does not find {wheel.name} to be {platform}:\n{said}")
    _output("abi3audit", "--strict", str(wheel))
    _output("twine", "check", "--strict", str(wheel))
    with zipfile.ZipFile(wheel) as archive:
        kernels = [name for name in archive.namelist() if name.endswith(".so")]
        whole = [name for name in kernels if DEBUG_SECTION in archive.read(name)]
    if not kernels or whole:
        why = f"has debug symbols in {', '.join(whole)}" if whole else "has no kernels"
        raise WheelRefused(f"{wheel.name} {why}")


def _output(program: str, *arguments: str) -> str:
    """What a judge says. Raises WheelRefused with it unless it ends well."""
    command = [str(Path(sys.executable).parent / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelRefused(f"{program} refuses {arguments[-1]}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
