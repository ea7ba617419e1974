"""Whether nodes are there and have found each other."""

from __future__ import annotations

from collections.abc import Sequence

from kept.client.admin.cluster import describe_members
from kept.client.client import Client
from kept.client.core.metadata import Endpoint
from kept.client.json_api import CONNECT_TIMEOUT_S, HttpFailed, JsonApi
from kept.client.security.security import PLAINTEXT, Security
from kept.storage.errors import KeptError


def cluster_is_up(endpoints: Sequence[Endpoint], security: Security = PLAINTEXT) -> str | None:
    """Whether each of these nodes is ready and knows all of them as brokers that take part.

    Says who is not, and why; None when all are.
    """
    for endpoint in endpoints:
        try:
            active = _active_brokers(endpoint, security)
        except KeptError as error:
            return str(error)
        if active < len(endpoints):
            return f"{endpoint} knows {active} of {len(endpoints)} brokers"
    return None


def _active_brokers(endpoint: Endpoint, security: Security) -> int:
    """How many brokers a node knows that take part. Raises HttpFailed for one that is not ready.

    On a listener with SASL the question is Kafka's: there is no HTTP.
    """
    if security.mechanism:
        timeout_ms = int(CONNECT_TIMEOUT_S * 1000)
        with Client(str(endpoint), timeout_ms=timeout_ms, security=security) as client:
            _, members = client.run(describe_members())
        return sum(not member.fenced for member in members)
    cluster = JsonApi(endpoint, CONNECT_TIMEOUT_S, security).get("cluster")
    if not cluster["ready"]:
        raise HttpFailed(f"{endpoint} is not ready: {cluster['reason']}")
    return sum(not broker["fenced"] for broker in cluster["brokers"])
