"""Settings of a node: their definitions, their sources, and what is checked before a start."""
