"""Kafka's protocol on the clients' port: connections, API versions, codecs, handlers."""
