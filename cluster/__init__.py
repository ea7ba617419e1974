"""Metadata records, the image made of them, and the decisions taken on it."""
