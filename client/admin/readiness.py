"""Whether nodes are there and have found each other."""

from __future__ import annotations

from collections.abc import Sequence

from kept.client.core.metadata import Endpoint
from kept.client.json_api import CONNECT_TIMEOUT_S, HttpFailed, JsonApi
from kept.client.security.security import PLAINTEXT, Security


def cluster_is_up(endpoints: Sequence[Endpoint], security: Security = PLAINTEXT) -> str | None:
    """Whether each of these nodes is ready and knows all of them as brokers that take part.

    Says who is not, and why; None when all are.
    """
    for endpoint in endpoints:
        try:
            cluster = JsonApi(endpoint, CONNECT_TIMEOUT_S, security).get("cluster")
        except HttpFailed as error:
            return str(error)
        if not cluster["ready"]:
            return f"{endpoint} is not ready: {cluster['reason']}"
        active = sum(not broker["fenced"] for broker in cluster["brokers"])
        if active < len(endpoints):
            return f"{endpoint} knows {active} of {len(endpoints)} brokers"
    return None
