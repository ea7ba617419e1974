"""What may be dropped from a log, and dropping it."""
