"""Handlers of topics: creation, deletion, settings, where replicas are."""
