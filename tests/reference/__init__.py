"""What each compiled kernel does, in plain Python that can be read: its specification.

The suites of the kernels run over both and demand equal results, errors included. These modules are
no part of the product: only the kernels of record batches and of Arrow blocks have a fallback there
(``kept.storage.records.python``, ``python_blocks``), see docs/adr/0004.
"""
