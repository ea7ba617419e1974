"""Topics, settings, groups, replicas and the quorum: operations of administrators."""
