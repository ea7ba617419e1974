"""Followers fetch from leaders: one loop per leader over the node listener (KIP-227, KIP-903)."""
