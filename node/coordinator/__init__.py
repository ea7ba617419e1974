"""Coordinators, whose state is kept in internal topics: consumer groups, transactions."""
