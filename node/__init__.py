"""The process: listeners, Kafka handlers, HTTP, groups, metrics, configuration."""
