"""Offset maps and rule maps, compiled, with their readable twins in Python."""
