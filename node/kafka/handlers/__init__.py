"""One function for each Kafka API, found by ``kept.node.kafka.api`` and imported at its first
request."""
