"""Who may do what, as the metadata log says it: ACLs, SCRAM credentials and client quotas, pure."""
