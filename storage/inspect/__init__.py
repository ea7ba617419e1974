"""Offline: checking and printing the files of a data directory."""
