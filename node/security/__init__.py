"""Who speaks and what they may do: sessions, authentication, authorization, quotas of clients."""
