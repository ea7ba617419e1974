"""What a log knows of its producers, and its snapshots."""
