"""One partition's leader and follower."""
