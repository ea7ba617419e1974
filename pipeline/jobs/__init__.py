"""The jobs, for notebooks and programs: what ``kept spark`` runs.

::

    from pyspark.sql import SparkSession
    from kept.pipeline import jobs

    spark = SparkSession.builder.getOrCreate()
    users = jobs.table(spark, "localhost:9092", "users")
"""

from kept.pipeline.jobs.analysis import Analysis, analyze
from kept.pipeline.jobs.audits import Audit, Finding, audit
from kept.pipeline.jobs.exports import Export, compact, export, restore
from kept.pipeline.jobs.report import page
from kept.pipeline.jobs.tables import Refreshed, refresh, saved, table
from kept.pipeline.session import session

__all__ = [
    "Analysis",
    "Audit",
    "Export",
    "Finding",
    "Refreshed",
    "analyze",
    "audit",
    "compact",
    "export",
    "page",
    "refresh",
    "restore",
    "saved",
    "session",
    "table",
]
