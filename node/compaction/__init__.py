"""Compaction in a node: the cleaner, dry runs, digests of what a replica has."""
