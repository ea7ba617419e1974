"""What operators change: topics, records, offsets, settings, leaders."""
