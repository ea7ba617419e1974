"""Handlers of transactions: producer ids, partitions, markers, and what batches of one need."""
