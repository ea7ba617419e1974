"""What every part of a node runs on: clock, log lines, yielding, executors, limits, error codes."""
