"""Planted bugs of replication and the controller (see planted.py)."""

from __future__ import annotations
