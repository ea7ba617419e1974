"""What operators see: the cluster, its quorum, topics, groups, transactions, directories."""
