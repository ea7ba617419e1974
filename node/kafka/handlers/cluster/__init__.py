"""Handlers that describe the cluster: Metadata, brokers, the quorum, log directories."""
