"""Reaching a cluster that speaks the Kafka protocol."""
