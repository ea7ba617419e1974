"""Writes: sinks for batches and streams, their tasks, and the ledger of exactlyOnce."""
