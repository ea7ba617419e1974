"""Reaching a cluster that speaks the Kafka protocol: kept or Apache Kafka.

``core`` decides (metadata, leaders, retries, what an error means) and ``protocol`` has the
messages; neither does I/O. ``admin`` and ``consume`` hold operations: generators that yield lists
of calls. Two shells drive them: :mod:`kept.client.client`, blocking, over
:mod:`kept.client.sockets`, and :mod:`kept.node.admin.cluster_client`, asynchronous, over
:mod:`kept.client.node_connection`. :mod:`kept.client.json_api` is for kept's JSON API.
"""
