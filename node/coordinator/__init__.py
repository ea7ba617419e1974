"""Coordinators: consumer groups."""
