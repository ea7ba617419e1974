"""The handlers of Kafka's APIs: ``kept.node.kafka.api`` has their table."""
