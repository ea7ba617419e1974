"""Advertised = served (rule 39), compared with Apache Kafka 4.3's own answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kept.client.protocol import messages as protocol
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import FeatureRecord
from kept.node.kafka import api

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden" / "api_versions_4_3.json").read_text("utf-8")
)
NOT_SERVED = {
    34: "one directory per replica is chosen at creation",
    38: "delegation tokens",
    39: "delegation tokens",
    40: "delegation tokens",
    41: "delegation tokens",
    57: "features",
    68: "KIP-848",
    69: "KIP-848",
    74: "client metrics",
    **dict.fromkeys([76, 77, 78, 79, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92], "share, streams"),
}
SUPPORTED = [("transaction.version", 0, 2), ("kept.security", 0, 1)]


def versions(response):
    return {int(k.api_key): [int(k.min_version), int(k.max_version)] for k in response.api_keys}


@pytest.mark.parametrize("version", range(5))
def test_what_is_served_is_served_as_kafka_does(wire, version):
    response = wire.ask(18, version, client_software_name="x", client_software_version="1.0")
    assert int(response.error_code) == 0
    golden = {int(k): v for k, v in GOLDEN["v4"]["api_keys"].items()}
    ours = versions(response)
    assert {key: golden[key] for key in ours} == ours
    assert set(golden) - set(ours) == set(NOT_SERVED)


@pytest.mark.parametrize("version", [3, 4])
def test_the_features_that_are_claimed(wire, version):
    response = wire.ask(18, version, client_software_name="x", client_software_version="1.0")
    supported = [(f.name, f.min_version, f.max_version) for f in response.supported_features]
    assert supported == SUPPORTED * (version >= 4)
    finalized = {f.name: f.max_version_level for f in response.finalized_features}
    assert finalized == {"transaction.version": 2, "kept.security": 1}
    assert response.finalized_features_epoch > 0


BARE = b"\2x\2y\0"
"""A software name and version, without tags."""


@pytest.mark.parametrize("version", range(5))
@pytest.mark.parametrize("level", [0, 1, 2])
def test_features_are_served_as_far_as_the_version_knows_them(version, level):
    image, _ = Image().apply([FeatureRecord("transaction.version", level)])
    body = api.api_versions_response(version, memoryview(BARE), image)
    _, response = protocol.decode_response(18, version, bytes(4) + body)
    assert int(response.error_code) == 0
    if version >= 3:
        supported = [(f.name, f.min_version, f.max_version) for f in response.supported_features]
        assert supported == SUPPORTED * (version >= 4)
        assert [
            (f.name, f.min_version_level, f.max_version_level) for f in response.finalized_features
        ] == [("transaction.version", level, level)] * (level > 0)
        assert response.finalized_features_epoch == (image.index if level else -1)
    newest = {key: pair[1] for key, pair in versions(response).items()}
    assert (newest[26], newest[28]) == ((5, 5) if level == 2 else (4, 4))


def test_an_unknown_version_is_answered_in_version_0(wire):
    frame = bytearray(protocol.encode_request(18, 0, 9, "new", {}))
    frame[6:8] = (77).to_bytes(2, "big")
    wire.raw(bytes(frame))
    correlation_id, response = wire.response(18, 0)
    assert (correlation_id, int(response.error_code)) == (9, 35)
    assert versions(response)[18] == [0, 4]


@pytest.mark.parametrize("name", ["", "-x", "x y", "ü", "x-"])
def test_a_bad_software_name_is_an_invalid_request(wire, name):
    response = wire.ask(18, 3, client_software_name=name, client_software_version="1")
    assert int(response.error_code) == 42


def test_every_api_has_its_handler_and_flexible_version():
    from kio.static.constants import EntityType

    for served in api.served().values():
        if served.key not in (0, 1, 18):
            assert callable(getattr(api.handler_class(served), served.name))
        for version in range(max(served.min_version, served.refused_below), served.max_version + 1):
            cls = protocol.message_type(served.key, version, EntityType.request)
            assert protocol.header_is_flexible(cls) or cls.__flexible__ is False
            assert cls.__flexible__ == (version >= served.flexible_from), (served.name, version)
