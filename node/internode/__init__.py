"""Between nodes: messages of Raft, calls, heartbeats and probes, in frames over connections.

:class:`kept.node.internode.peers.Peers` is what a node holds; protobuf is loaded when it is
started, which a lone node never does. :mod:`kept.node.proto` has the messages,
``protobuf_conversion`` joins them to the dataclasses of ``cluster``.
"""
