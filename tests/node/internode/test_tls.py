"""Peers over TLS: a node is at the address that its certificate names, and nobody else is."""

from __future__ import annotations

import pytest

from kept.node.config.node_config import NodeConfig
from kept.node.internode.controller_rpc import AllocateProducerIdsReply, AllocateProducerIdsRequest
from kept.node.internode.peers import TIMEOUT
from kept.node.security.listener_tls import ListenerTls
from kept.storage.errors import NetworkException
from tests.support.certificates import Authority

REQUEST = AllocateProducerIdsRequest(1, 5)


def tls_of(tmp_path, key_store: str, trust_store: str, **more: str) -> ListenerTls:
    """That of a node's listener between nodes, and of its connections to others'."""
    settings = {
        "node.id": "1",
        "listeners": "PLAINTEXT://127.0.0.1:0,NODE://127.0.0.1:10001",
        "listener.security.protocol.map": "NODE:SSL",
        "controller.quorum.voters": "1@127.0.0.1:10001,2@127.0.0.1:10002",
        "ssl.keystore.location": key_store,
        "ssl.truststore.location": trust_store,
        **more,
    }
    config = NodeConfig.load(None, settings, {}, port=None, data_dir=str(tmp_path / "data"))
    listener = config.node_listener
    assert listener is not None
    return ListenerTls(config, listener, between_nodes=True)


async def two_nodes(net, ours: ListenerTls, theirs: ListenerTls, host: str):
    """Node 1, which looks for node 2 at ``host``, and how often node 2 was asked something."""
    asked = []

    async def allocate(request):
        asked.append(request)
        return AllocateProducerIdsReply(7, 1)

    one = await net.node(1, server_tls=ours.context, tls=lambda: ours.client_context)
    two = await net.node(2, server_tls=theirs.context, tls=lambda: theirs.client_context)
    two.peers.serve("AllocateProducerIds", allocate)
    net.ports[2] = host, two.port
    return one, asked


@pytest.mark.parametrize("named", ["localhost", "127.0.0.1", "elsewhere.test"])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_node_is_believed_at_an_address_that_its_certificate_names(
    net, tmp_path, host, named
):
    authority = Authority(tmp_path)
    ours = tls_of(tmp_path, authority.issue("one", "127.0.0.1"), authority.ca)
    theirs = tls_of(tmp_path, authority.issue("two", named), authority.ca)
    one, asked = await two_nodes(net, ours, theirs, host)
    if host == named:
        assert (await one.peers.call(2, "AllocateProducerIds", REQUEST)).first == 7
        assert (await one.peers.identify(host, net.ports[2][1])).node_id == 2
        return
    with pytest.raises(NetworkException, match=r"its certificate: .* mismatch"):
        await one.peers.call(2, "AllocateProducerIds", REQUEST)
    with pytest.raises(NetworkException, match=r"its certificate: .* mismatch"):
        await one.peers.identify(host, net.ports[2][1])
    assert await one.peers.probe(2) == TIMEOUT, "that shows nobody's death"
    assert not asked


async def test_a_name_is_not_looked_at_where_settings_say_so(net, tmp_path):
    authority = Authority(tmp_path)
    unnamed = {"ssl.endpoint.identification.algorithm": ""}
    ours = tls_of(tmp_path, authority.issue("one", "127.0.0.1"), authority.ca, **unnamed)
    theirs = tls_of(tmp_path, authority.issue("two", "elsewhere.test"), authority.ca)
    one, asked = await two_nodes(net, ours, theirs, "127.0.0.1")
    assert (await one.peers.call(2, "AllocateProducerIds", REQUEST)).first == 7
    assert asked == [REQUEST]


@pytest.mark.parametrize("stranger", ["the node that is asked", "the node that asks"])
async def test_a_right_name_of_another_authority_is_not_believed(net, tmp_path, stranger):
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    known = tls_of(tmp_path, authority.issue("known", "127.0.0.1"), authority.ca)
    # It trusts those whom it is not trusted by.
    both = tmp_path / "both.pem"
    both.write_text(authority.ca_pem + other.ca_pem)
    strange = tls_of(tmp_path, other.issue("strange", "127.0.0.1"), str(both))
    ours, theirs = (known, strange) if "asked" in stranger else (strange, known)
    one, asked = await two_nodes(net, ours, theirs, "127.0.0.1")
    with pytest.raises(NetworkException):
        await one.peers.call(2, "AllocateProducerIds", REQUEST, 5.0)
    assert not asked
