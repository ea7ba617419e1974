"""Reading: offsets of leaders, Fetch, consumers, ranges of offsets."""
