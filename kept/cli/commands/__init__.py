"""The commands of ``kept``: a module for each, of its name."""
