"""What each compiled kernel does, in plain Python that can be read: its specification.

The suites of the kernels run over both and demand equal results, errors included. These modules are
no part of the product: only the kernel of record batches has a fallback there
(``kept.storage.records.python``), see docs/adr/0004.
"""
