"""One function for each Kafka API, found by ``kept.node.api`` and imported at its first request."""
