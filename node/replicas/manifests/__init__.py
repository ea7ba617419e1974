"""Manifests in a node: what each replica holds and applies, and how they travel."""
