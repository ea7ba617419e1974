"""The log of one partition on one disk."""
