"""The metadata: records, image, write-ahead log, snapshots, and one node that keeps them."""
