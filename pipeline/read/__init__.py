"""Reads: ranges of offsets for a batch or a trigger, and the tasks that bring them."""
