"""The log of one partition: appending, reading, truncating, retention, durability, recovery."""
