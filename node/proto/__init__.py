"""What nodes say to each other, as protobuf: ``*.proto``, and the modules that the build makes.

``raft.proto``, ``controller.proto`` and ``peers.proto`` are the source. ``kept.node.proto.build``
compiles them to ``*_pb2.py`` with stubs beside them; these are made by the package build and by
``make setup``, never committed. Importing one costs 10 MB, so only a node of several does.
"""
