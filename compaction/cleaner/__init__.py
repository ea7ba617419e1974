"""One cleaner run: planned, surveyed, built, checked, in a worker process."""
