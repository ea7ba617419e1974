"""PySpark reads and writes topics: the data source ``kept``, without a jar.

``pyspark_kept`` is what Spark looks for when it meets ``format("kept")``; everything else is here.
Options, planning, admission and the columns are plain Python that knows nothing of Spark
(:mod:`kept.pipeline.options` and its siblings); :mod:`kept.pipeline.source` joins them to PySpark's
classes. Needs the extra ``spark``.
"""
