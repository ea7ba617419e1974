"""Between nodes: gRPC streams of Raft messages, calls of the controller, probes.

:class:`kept.node.internode.peers.Peers` is what a node of several holds; nothing here is imported
by a lone node, and grpc (22 MB) only by ``server`` and ``peer_channel``. :mod:`kept.node.proto` has
the messages, ``protobuf_conversion`` joins them to the dataclasses of ``cluster``.
"""
