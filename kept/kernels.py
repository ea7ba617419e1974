"""Which of kept's compiled kernels can run here.

The build may leave kernels out (there is no compiler, or it fails), and an installation may lack
them: then their twins in plain Python do the same, 10 to 20 times slower. A node and its worker
processes name what they lack, so that nobody has to guess it from the processor's load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Final

PACKAGE: Final = "kept."
NAMES: Final = (
    "client._bounds",
    "compaction.kernels._kernel",
    "compaction.kernels._strategies",
    "node.kafka.codec._codec",
    "storage.records._blocks",
    "storage.records._filter",
    "storage.records._kernel",
    "storage.records._packing",
)
"""The extension modules of this package, without its name."""


def python_is_chosen() -> bool:
    """Whether ``KEPT_KERNEL=python`` asks for the twins of all kernels."""
    return os.environ.get("KEPT_KERNEL") == "python"


def uncompiled(names: Sequence[str] = NAMES, *, load: bool = False) -> tuple[str, ...]:
    """The kernels among ``names`` whose twins in Python run in this process.

    With ``load`` every kernel is imported to find out: one whose file is here may still fail to
    load. Without it, that its file is found for this interpreter is enough.
    """
    if python_is_chosen():
        return tuple(names)
    is_there: Callable[[str], bool] = _loads if load else _is_found
    return tuple(name for name in names if not is_there(PACKAGE + name))


def _is_found(module: str) -> bool:
    return find_spec(module) is not None


def _loads(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True
