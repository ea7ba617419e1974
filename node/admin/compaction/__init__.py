"""Compaction for operators: status, passes on demand, reports of replicas."""
