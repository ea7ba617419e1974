"""The client without I/O: calls, their routes, connections, retries; shells do the rest."""
