"""Handlers of who may do what and how much: ACLs, SCRAM, SASL, client quotas."""
