"""What each compiled kernel does, in plain Python that can be read: its specification.

The suites of the kernels run over both and demand equal results, errors included. These modules are
no part of the product. Fallbacks are there for record batches and Arrow blocks
(``kept.storage.records.python``, ``python_blocks``) and for single requests of Produce and Fetch
(``kept.node.kafka.codec``), see docs/adr/0004.
"""
