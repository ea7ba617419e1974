"""gRPC on the clients' port: ``broker.Broker``, reflection and health.

``lazy_server`` receives connections whose first four bytes are HTTP/2's and is all that a node
without gRPC clients loads; the first such client has the rest imported and the server started.
Records go the way of every Kafka client (:mod:`kept.node.admin.cluster_client`): this node asks the
partition's leader, itself or another, in Kafka's protocol, so both faces have the same rules.
"""
