"""What a build says about kernels that it can't compile, and what compilers say about our C."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kept import kernels
from kept.kernels_build import LIMITED_API

ROOT = Path(__file__).resolve().parents[2]
SETUP = """
from setuptools import Extension, setup
from kept.kernels_build import BuildExt
setup(
    name="two", version="1", py_modules=[], cmdclass={"build_ext": BuildExt},
    ext_modules=[Extension(n, [n + ".c"], optional=True) for n in ("good", "bad")],
)
"""
each_compiler = pytest.mark.parametrize(
    "compiler",
    [
        pytest.param("gcc", marks=pytest.mark.c_compiler),
        pytest.param("clang", marks=pytest.mark.clang),
    ],
)


def build(folder, **environ):
    """Build two extensions of which one does not compile."""
    (folder / "setup.py").write_text(SETUP)
    (folder / "good.c").write_text("int good;\n")
    (folder / "bad.c").write_text("#error this machine can't\n")
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"],
        cwd=folder,
        env={**os.environ, "KEPT_REQUIRE_KERNELS": "", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.c_compiler
def test_a_kernel_that_does_not_compile_is_left_out_and_named_last(tmp_path):
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout
    said = done.stdout.rstrip().splitlines()[-1]
    assert "kernels left out" in said, done.stdout
    assert re.search(r": bad \(\S+ ended with status 1, see above\)\. KEPT_REQ", said), said
    (made,) = tmp_path.rglob("*.so")
    assert made.name.startswith("good.")


@pytest.mark.c_compiler
def test_a_kernel_that_is_required_fails_the_build(tmp_path):
    done = build(tmp_path, KEPT_REQUIRE_KERNELS="1")
    assert done.returncode != 0
    assert "kernels left out" in done.stdout and "bad (" in done.stdout


def test_a_machine_without_a_compiler_leaves_out_all(tmp_path):
    done = build(tmp_path, CC=str(tmp_path / "no-such-compiler"))
    assert done.returncode == 0, done.stdout
    said = done.stdout.rstrip().splitlines()[-1]
    assert "bad (" in said and "good (" in said and "no-such-compiler" in said


def test_our_build_is_that_build_and_our_makefile_and_image_require_all():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert config["cmdclass"]["build_ext"] == "kept.kernels_build.BuildExt"
    assert re.search(r"^export KEPT_REQUIRE_KERNELS \?= 1$", (ROOT / "Makefile").read_text(), re.M)
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert dockerfile.index("KEPT_REQUIRE_KERNELS=1") < dockerfile.index(" wheel ")


def test_kernels_are_built_for_the_oldest_python_that_is_allowed_and_all_later_ones():
    """Three places say which: what is installed, what wheels are named, what C is told."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    oldest = re.fullmatch(r">=3\.(\d+)", config["project"]["requires-python"])
    assert oldest
    assert config["tool"]["distutils"]["bdist_wheel"]["py-limited-api"] == f"cp3{oldest[1]}"
    assert int(LIMITED_API, 16) == 3 << 24 | int(oldest[1]) << 16


@pytest.mark.kernels
@pytest.mark.parametrize("name", kernels.NAMES)
def test_a_kernel_is_one_file_for_every_python(name):
    found = importlib.util.find_spec(kernels.PACKAGE + name)
    assert found is not None and found.origin is not None
    assert found.origin.endswith(".abi3.so")


CHECKSUM = r"""
#include <stdio.h>
#include "crc32c.h"

int main(void)
{
    static unsigned char data[20000];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)(i * i >> 3);
    if (kept_crc32c(0, (const unsigned char *)"123456789", 9) != 0xe3069283u)
        return 1;
    for (size_t length = 0; length < sizeof data - 8; length += 61)
        for (size_t at = 0; at < 8; at++)
            if (kept_crc32c(0, data + at, length) != kept_crc32c_software(0, data + at, length))
                return 2;
#ifdef KEPT_CRC32C_X86
    printf("%s", kept_crc32c_chosen == kept_crc32c_sse42 ? "instruction" : "tables");
#endif
    return 0;
}
"""
BASELINE = ("-mno-sse4.2", "-mno-crc32")
"""A compiler that is told to use no such instruction by itself."""


def knows(compiler, option):
    """Whether a compiler has this option; some came late."""
    probe = [compiler, option, "-Werror", "-fsyntax-only", "-x", "c", os.devnull]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@each_compiler
@pytest.mark.parametrize("baseline", [False, True])
def test_the_checksum_compiles_without_a_warning_and_is_right(tmp_path, compiler, baseline):
    source = tmp_path / "check.c"
    source.write_text(CHECKSUM)
    on_x86 = os.uname().machine == "x86_64"
    options = [o for o in BASELINE if baseline and on_x86 and knows(compiler, o)]
    subprocess.run(
        [
            compiler,
            "-std=gnu11",
            "-O3",
            "-Wall",
            "-Wextra",
            "-Werror",
            *options,
            "-I",
            ROOT / "storage" / "records",
            source,
            "-o",
            tmp_path / "check",
        ],
        check=True,
    )
    done = subprocess.run([tmp_path / "check"], check=True, capture_output=True, text=True)
    if on_x86 and "sse4_2" in Path("/proc/cpuinfo").read_text():
        assert done.stdout == "instruction", "whatever the compiler's baseline is"


HEADERS = {
    "storage/records": ["crc32c.h"],
    "compaction/kernels": ["siphash.h", "table.h"],
}


@each_compiler
def test_each_header_compiles_alone(tmp_path, compiler):
    found = {str(path.relative_to(ROOT)) for path in ROOT.glob("[a-z]*/**/*.h")}
    listed = {f"{folder}/{name}" for folder, names in HEADERS.items() for name in names}
    assert listed <= found
    for name in sorted(listed):
        source = tmp_path / "one.c"
        source.write_text(f'#include "{ROOT / name}"\nint main(void) {{ return 0; }}\n')
        subprocess.run(
            [
                compiler,
                "-std=gnu11",
                "-fsyntax-only",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-Wno-unused-function",
                source,
            ],
            check=True,
        )


@pytest.mark.slow
@pytest.mark.clang
def test_clang_compiles_every_kernel(tmp_path):
    """A build with it leaves none out."""
    places = (f"--build-lib={tmp_path}/lib", f"--build-temp={tmp_path}/temp")
    done = subprocess.run(
        [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "build_ext", *places],
        cwd=ROOT,
        env={**os.environ, "CC": "clang", "KEPT_REQUIRE_KERNELS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    made = {
        ".".join(path.relative_to(tmp_path / "lib").parts).partition(".abi3")[0]
        for path in (tmp_path / "lib").rglob("*.so")
    }
    assert made == {kernels.PACKAGE + name for name in kernels.NAMES}
