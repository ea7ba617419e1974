"""Builds the compiled kernels for the limited API, and says which of them it left out.

Kernels use only what :pep:`384` promises for :data:`LIMITED_API` and all later versions. So one
file, and one wheel (``cp311-abi3``), serves every CPython from that version on:
docs/adr/0015-one-wheel-for-every-python.md.

They are optional (``[tool.setuptools] ext-modules``): where no compiler works the installation
goes on without them, and setuptools' own warning is lost among a compiler's. This ``build_ext``
ends with a line that names each kernel it left out with the reason. With
``KEPT_REQUIRE_KERNELS=1``, which the Makefile and the image set, the build fails instead; pip shows
a build's output only then, or with ``-v``.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any, Final

from setuptools.command import build_ext as _setuptools
from setuptools.errors import CompileError

REQUIRED: Final = "KEPT_REQUIRE_KERNELS"
LIMITED_API: Final = "0x030B0000"
"""Python 3.11, the oldest that ``requires-python`` allows."""
_BuildExt: Any = _setuptools.build_ext


def _reason(error: Exception) -> str:
    """What went wrong, without the compiler's many options."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, subprocess.CalledProcessError):
        return f"{cause.cmd[0]} ended with status {cause.returncode}, see above"
    return " ".join(str(error).split()) or type(error).__name__


class BuildExt(_BuildExt):  # type: ignore[misc]
    """setuptools' ``build_ext`` that keeps account of extensions that fail."""

    def run(self) -> None:
        """Build as ever. Raises CompileError when a kernel is left out and all are required."""
        self.left_out: dict[str, str] = {}
        for extension in self.extensions:
            extension.py_limited_api = True  # the name of the file
            extension.define_macros.append(("Py_LIMITED_API", LIMITED_API))
        super().run()
        if not self.left_out:
            return
        named = "; ".join(f"{name} ({why})" for name, why in sorted(self.left_out.items()))
        line = f"kernels left out, so a node serves far slower or compacts nothing: {named}"
        if os.environ.get(REQUIRED) == "1":
            raise CompileError(f"{line}. {REQUIRED}=1 wants all of them")
        self.warn(f"{line}. {REQUIRED}=1 makes this an error")

    def build_extension(self, ext: Any) -> None:
        """Build one, or note why it can't be built."""
        try:
            super().build_extension(ext)
        except Exception as error:
            self.left_out[ext.name] = _reason(error)
            raise
