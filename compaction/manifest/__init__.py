"""Manifests: written by a leader, kept, applied and verified by replicas."""
