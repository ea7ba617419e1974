"""What each part of a node runs on: clock, log lines, time slices, executors, limits, errors."""
