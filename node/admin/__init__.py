"""Operations beyond Kafka, for HTTP and gRPC: compaction, cluster, lag, records."""
