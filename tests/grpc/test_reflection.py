"""Clients that learn the services by reflection find every one with its types."""

from __future__ import annotations

import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from kept.node.grpc.reflection import Symbols


def test_reflection_lists_every_service_with_its_types(rpc):
    database = ProtoReflectionDescriptorDatabase(rpc.channel)
    assert set(database.get_services()) == {
        "broker.Broker",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    file = database.FindFileContainingSymbol("broker.Broker")
    assert [m.name for m in file.service[0].method] == ["CreateTopic", "Produce", "Consume"]
    for member in ("broker.Broker.Produce", "broker.ProduceRequest.payload"):
        assert database.FindFileContainingSymbol(member).package == "broker"
    for nothing in ("broker.Broker.Consum", "broker.None", "broker.Broker.", "x.y.z"):
        with pytest.raises(KeyError):
            Symbols().FindFileContainingSymbol(nothing)
