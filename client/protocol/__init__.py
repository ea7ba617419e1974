"""Kafka's wire protocol: numbers of the APIs, messages, frames."""
