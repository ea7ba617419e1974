"""Segments of a log: their files, indexes, and replacing them."""
