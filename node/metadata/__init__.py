"""This node in the cluster: its metadata log, its link to other nodes, its registration."""
