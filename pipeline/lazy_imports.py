"""pyarrow and PySpark's functions, imported when one of theirs is used first.

So a module that uses them can be imported where the extra ``spark`` is not installed: by the
command line for its help, and by executors, which need no PySpark functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import functions as f
else:
    from importlib import import_module

    class _OnFirstUse:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> object:
            if attribute.startswith("_"):  # what pickle looks for
                raise AttributeError(attribute)
            return getattr(import_module(self._name), attribute)

    pa, f = _OnFirstUse("pyarrow"), _OnFirstUse("pyspark.sql.functions")

__all__ = ["f", "pa"]
