"""ApiVersions is answered by ``kept.node.api`` itself; the connection never comes here.

The module stands for the API in the registry, so that it is advertised like any other.
"""
