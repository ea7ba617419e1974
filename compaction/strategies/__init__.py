"""Running strategies over a whole log, and the test kit for them."""
