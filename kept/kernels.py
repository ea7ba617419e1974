"""Which of kept's compiled kernels can run here, and what stands for those that cannot.

The build may leave kernels out (there is no compiler, or it fails), and an installation may lack
them. Those in :data:`FALLBACKS` have a form in plain Python that does the same 10 to 20 times
slower: without them a node serves, and the Spark connector reads. The others have none: without
them a node compacts nothing. A node and its worker processes name what they lack, so that nobody
has to guess it from the processor's load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from kept.storage.errors import ConfigurationError

PACKAGE: Final = "kept."
NAMES: Final = (
    "client.protocol._bounds",
    "compaction.kernels._kernel",
    "compaction.kernels._strategies",
    "node.kafka.codec._codec",
    "storage.records._blocks",
    "storage.records._filter",
    "storage.records._kernel",
    "storage.records._batch_builder",
)
"""The extension modules of this package, without its name."""
FALLBACKS: Final = (
    "client.protocol._bounds",
    "node.kafka.codec._codec",
    "storage.records._blocks",
    "storage.records._kernel",
)
"""Those that plain Python stands in for."""


def python_is_chosen() -> bool:
    """Whether ``KEPT_KERNEL=python`` asks for plain Python wherever there is any."""
    return os.environ.get("KEPT_KERNEL") == "python"


def uncompiled(names: Sequence[str] = NAMES, *, load: bool = False) -> tuple[str, ...]:
    """The kernels among ``names`` that do not run in this process.

    With ``load`` every kernel is imported to find out: one whose file is here may still fail to
    load. Without it, that its file is found for this interpreter is enough.
    """
    is_there: Callable[[str], bool] = _loads if load else _is_found
    plain = FALLBACKS if python_is_chosen() else ()
    return tuple(name for name in names if name in plain or not is_there(PACKAGE + name))


def load(kernel: str, name: str) -> Any:
    """``name`` of a kernel without a fallback; where it does not load, what raises when called."""
    try:
        return getattr(import_module(PACKAGE + kernel), name)
    except ImportError as error:
        return Missing(kernel, name, error)


class Missing:
    """Stands for a class or function of a kernel that is not here."""

    def __init__(self, kernel: str, name: str, error: ImportError) -> None:
        self._why = (
            f"{name} needs the compiled kernel {PACKAGE}{kernel}, which does not load ({error}): "
            "install kept where a C compiler is at hand, see the README"
        )

    def __call__(self, *_args: object, **_kwargs: object) -> Any:
        """Raises ConfigurationError with what would be right."""
        raise ConfigurationError(self._why)


def _is_found(module: str) -> bool:
    return find_spec(module) is not None


def _loads(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True
