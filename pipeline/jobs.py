"""The jobs, for notebooks and programs: what ``kept spark`` runs.

::

    from pyspark.sql import SparkSession
    from kept.pipeline import jobs

    spark = SparkSession.builder.getOrCreate()
    users = jobs.table(spark, "localhost:9092", "users")
"""

from kept.pipeline.analysis import Analysis, analyze
from kept.pipeline.audits import Audit, Finding, audit
from kept.pipeline.exports import Export, compact, export, restore
from kept.pipeline.report import page
from kept.pipeline.session import session
from kept.pipeline.tables import Refreshed, refresh, saved, table

__all__ = [
    "Analysis", "Audit", "Export", "Finding", "Refreshed", "analyze", "audit", "compact", "export",
    "page", "refresh", "restore", "saved", "session", "table",
]  # fmt: skip
