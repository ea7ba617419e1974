"""Whether the settings of security make sense together: who may administer, and who gets around it.

An error keeps the node from starting. A warning is logged at each start, and shown by
``kept serve --check``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.node.config.sasl import sasl_warnings
from kept.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from kept.node.config.node_config import NodeConfig


def check_authorizer(config: NodeConfig) -> None:
    """Raises ConfigurationError for an authorizer that locks everybody out, or that the listener
    between nodes leads around.
    """
    if not config.authorizer_class_name:
        if config.super_users:
            raise ConfigurationError(
                "super.users is set without authorizer.class.name, so that everybody may do "
                f"everything: set authorizer.class.name={STANDARD_AUTHORIZER}"
            )
        return
    if not config.super_users and not config.allow_everyone_if_no_acl_found:
        raise ConfigurationError(
            "authorizer.class.name is set, but super.users names nobody: no one could create the "
            "first ACL. Set super.users=User:admin, with a name that logs in"
        )
    node = config.node_listener
    if (
        node is not None
        and node.protocol == "PLAINTEXT"
        and not node.is_loopback
        and not config.node_network_trusted
    ):
        raise ConfigurationError(
            f"authorizer.class.name is set, but listener {node} between nodes is PLAINTEXT: "
            "whoever reaches it is taken for a node, which may do everything. Let it speak SSL, or "
            "set kept.node.network.trusted=true where a firewall lets nodes only reach it"
        )


def is_secured(config: NodeConfig) -> bool:
    """Whether anybody logs in, or anything decides what they may do."""
    return bool(config.authorizer_class_name) or any(
        listener.protocol != "PLAINTEXT" for listener in config.listeners
    )


def security_warnings(config: NodeConfig) -> list[str]:
    """What is allowed and probably not wanted, a sentence each."""
    warnings = sasl_warnings(config)
    protocols = {listener.name: listener.protocol for listener in config.listeners}
    secured = [name for name, protocol in protocols.items() if protocol != "PLAINTEXT"]
    if secured:
        warnings += [
            f"listener {listener} is PLAINTEXT and reached from other machines, beside "
            f"{', '.join(secured)}: whoever comes in by it is User:ANONYMOUS"
            for listener in config.listeners
            if listener.protocol == "PLAINTEXT" and not listener.is_loopback
        ]
    warnings += [
        f"ssl.client.auth={config.ssl_client_auth} does not count for listener {listener.name}, "
        f"where SASL says who comes: set listener.name.{listener.name.lower()}.ssl.client.auth"
        for listener in config.listeners
        if listener.protocol == "SASL_SSL"
        and config.of_listener(listener.name).ssl_client_auth != config.tls_client_auth(listener)
    ]
    node = config.node_listener
    if (
        node is not None
        and node.protocol == "SSL"
        and not config.of_listener(node.name).ssl_endpoint_identification_algorithm
    ):
        warnings.append(
            f"ssl.endpoint.identification.algorithm is empty for listener {node.name}: whoever has "
            "a certificate of a trusted authority may answer in place of another node"
        )
    logs_in = [name for name, protocol in protocols.items() if protocol.startswith("SASL_")]
    if logs_in and not config.authorizer_class_name:
        warnings.append(
            f"clients log in on {', '.join(logs_in)}, but authorizer.class.name is not set: "
            "whoever got in may do everything"
        )
    return warnings
