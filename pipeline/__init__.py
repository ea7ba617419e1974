"""PySpark reads and writes topics: the data source ``kept``, without a jar.

``pyspark_kept`` is what Spark looks for when it meets ``format("kept")``; everything else is here.
``read`` plans and reads ranges of offsets, ``write`` has the sinks and the ledger of exactly-once
writes, ``jobs`` is what ``kept spark`` runs. Options, planning, admission and columns are plain
Python that knows nothing of Spark; :mod:`kept.pipeline.source` joins them to PySpark's classes.
Needs the extra ``spark``.
"""

import sys


def _load_kio() -> None:
    """Import kio without hypothesis, which it takes in wherever that is installed: 0.3 s of CPU and
    15 MB in every process that Spark starts, for tests of its own.
    """
    if sys.modules.keys().isdisjoint({"kio", "hypothesis"}):
        sys.modules["hypothesis"] = None  # type: ignore[assignment]
        try:
            import kio.static.primitive  # noqa: F401
        finally:
            del sys.modules["hypothesis"]


_load_kio()
