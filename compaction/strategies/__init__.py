"""Running strategies over a whole log."""
