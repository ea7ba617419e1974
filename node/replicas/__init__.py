"""The replicas on this node's disks: opened, led, fetched, flushed, expired; their manifests."""
