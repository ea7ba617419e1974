"""Configuration of a node among several: roles, voters, the node listener, times."""

import pytest

from kept.node.config.core_settings import lifecycle_settings, raft_settings, session_settings
from kept.node.config.node_config import NodeConfig
from kept.storage.errors import ConfigurationError

THREE = "0@a:10092,1@b:10092,2@c:10092"


def load(**settings) -> NodeConfig:
    given = {name.replace("__", ".").replace("_", "."): text for name, text in settings.items()}
    return NodeConfig.load(overrides=given, environ={})


def refusal(**settings) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(**settings)
    return str(caught.value)


# What follows from what.


def test_kafkas_way_to_name_controllers_makes_no_cluster_of_one():
    said = refusal(node_id="1", controller_quorum_bootstrap_servers="a:9093,b:9093,c:9093")
    assert "names 3 controllers" in said and "as in 0@node-0:10092" in said
    assert load(node_id="1", controller_quorum_bootstrap_servers="localhost:9093").alone
    both = load(
        node_id="1", controller_quorum_voters=THREE, controller_quorum_bootstrap_servers="a:1,b:1"
    )
    assert len(both.controller_quorum_voters) == 3


def test_a_voter_of_three_has_a_node_listener_on_the_client_port_plus_1000():
    config = load(node_id="1", controller_quorum_voters=THREE)
    assert not config.alone
    assert [str(one) for one in config.listeners] == ["PLAINTEXT://localhost:9092"]
    assert str(config.node_listener) == "NODE://localhost:10092"
    assert str(config.advertised_node_listener) == "NODE://b:10092", "where the voters look for it"
    assert [str(voter) for voter in config.controller_quorum_voters] == THREE.split(",")


def test_a_lone_node_has_none_and_a_lone_voter_neither():
    assert load().alone
    alone = load(node_id="7", controller_quorum_voters="7@a:10092")
    assert alone.alone
    assert alone.advertised_node_listener is None


def test_a_lone_voter_that_others_may_join_names_its_node_listener():
    config = load(
        node_id="7",
        controller_quorum_voters="7@a:10100",
        listeners="PLAINTEXT://localhost:9092,NODE://localhost:10100",
    )
    assert not config.alone
    assert str(config.node_listener) == "NODE://localhost:10100"
    assert str(config.advertised_node_listener) == "NODE://a:10100"


def test_a_broker_that_does_not_vote():
    config = load(node_id="9", process_roles="broker", controller_quorum_voters=THREE)
    assert str(config.advertised_node_listener) == "NODE://localhost:10092"
    elsewhere = load(
        node_id="9",
        process_roles="broker",
        controller_quorum_voters="0@a:10092",
        listeners="PLAINTEXT://:9092",
        advertised_listeners="PLAINTEXT://kept-9.example.org:19092",
    )
    assert str(elsewhere.node_listener) == "NODE://:10092"
    assert str(elsewhere.advertised_node_listener) == "NODE://kept-9.example.org:10092"


def test_a_controller_alone_needs_no_listener_for_clients():
    config = load(
        node_id="0",
        process_roles="controller",
        controller_quorum_voters=THREE,
        listeners="NODE://localhost:10092",
    )
    assert config.listeners == config.advertised_listeners == ()
    assert str(config.node_listener) == "NODE://localhost:10092"


def test_mapped_ports_are_advertised():
    config = load(
        node_id="0",
        controller_quorum_voters="0@a:31000,1@b:31000,2@c:31000",
        listeners="PLAINTEXT://localhost:9092,NODE://localhost:10092",
        advertised_listeners="NODE://a:31000",
    )
    assert str(config.node_listener) == "NODE://localhost:10092"
    assert str(config.advertised_node_listener) == "NODE://a:31000"


def test_the_rebalance_delay_is_kafkas_among_several():
    assert load().group_initial_rebalance_delay_ms == 0
    several = load(node_id="1", controller_quorum_voters=THREE)
    assert several.group_initial_rebalance_delay_ms == 3000


def test_broker_id_will_do_for_node_id():
    assert load(broker_id="2", controller_quorum_voters=THREE).node_id == 2


# Refusals, each with what would be right.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"process_roles": "broker"}, "process.roles=broker needs controller.quorum.voters"),
        (
            {"process_roles": "controller"},
            "process.roles=controller needs controller.quorum.voters: name every controller",
        ),
        ({"process_roles": ""}, "process.roles is empty"),
        ({"process_roles": "leader"}, "Invalid value leader for configuration process.roles"),
        (
            {"controller_quorum_voters": THREE},
            "node.id is not set, but controller.quorum.voters names 3 nodes",
        ),
        ({"controller_quorum_voters": "0@a:1,1@b:1"}, "node.id is not set, but"),
        (
            {"process_roles": "broker", "controller_quorum_voters": THREE},
            "node.id is not set, but controller.quorum.voters names 3 nodes",
        ),
        (
            {"node_id": "3", "controller_quorum_voters": THREE},
            "names no node 3, which is this node.id: add 3@host:port with its node port, or set "
            "process.roles=broker",
        ),
        (
            {"node_id": "1", "process_roles": "broker", "controller_quorum_voters": THREE},
            "process.roles=broker: add controller to it, or take node 1 out of the voters",
        ),
        (
            {"node_id": "0", "controller_quorum_voters": "0@a:1,1@b:1,0@c:1"},
            "node id 0 is given twice, 0@a:1 and 0@c:1",
        ),
        (
            {"node_id": "0", "controller_quorum_voters": "0@a:10092,1@a:10092"},
            "0@a:10092 and 1@a:10092 have the same address",
        ),
        ({"node_id": "0", "controller_quorum_voters": "0@a"}, "0@a is not id@host:port"),
        ({"node_id": "0", "controller_quorum_voters": "\uff10@a:1"}, "is not id@host:port"),
        ({"node_id": "0", "controller_quorum_voters": f"0@a:{'1' * 5000}"}, "is not id@host:port"),
        ({"node_id": "0", "listeners": f"PLAINTEXT://a:{'1' * 5000}"}, "is not NAME://host:port"),
        ({"node_id": "0", "listeners": "PLAINTEXT://a:\uff11"}, "is not NAME://host:port"),
        (
            {"node_id": "0", "controller_quorum_voters": "0@a:19092,1@b:1"},
            "controller.quorum.voters says 0@a:19092, but the node listener of node 0 is "
            "NODE://a:10092: give both the same port",
        ),
        (
            {
                "node_id": "0",
                "controller_quorum_voters": "0@a:10092,1@b:1",
                "advertised_listeners": "NODE://a:10093",
            },
            "is NODE://a:10093: give both the same port",
        ),
        (
            {
                "node_id": "0",
                "controller_quorum_voters": "0@a:10092,1@b:1",
                "advertised_listeners": "NODE://:10092",
            },
            "nobody can connect to no host",
        ),
        (
            {
                "node_id": "9",
                "process_roles": "broker",
                "controller_quorum_voters": THREE,
                "listeners": "PLAINTEXT://localhost:0",
            },
            "leaves no node port",
        ),
        (
            {
                "node_id": "9",
                "process_roles": "broker",
                "controller_quorum_voters": THREE,
                "listeners": "PLAINTEXT://localhost:65000",
            },
            "leaves no node port",
        ),
        (
            {
                "node_id": "9",
                "process_roles": "broker",
                "controller_quorum_voters": THREE,
                "listeners": "PLAINTEXT://localhost:9092,OTHER://localhost:10092",
                "listener_security_protocol_map": "OTHER:PLAINTEXT",
            },
            "OTHER://localhost:10092 and NODE://localhost:10092 are the same address",
        ),
        (
            {
                "node_id": "9",
                "process_roles": "broker",
                "controller_quorum_voters": THREE,
                "listeners": "NODE://localhost:10092",
            },
            "none is left for clients",
        ),
        (
            {"broker_session_timeout_ms": "3000"},
            "broker.heartbeat.interval.ms (2000) and kept.stall.ms (2000) together must be below "
            "broker.session.timeout.ms (3000)",
        ),
        (
            {"replica_lag_time_max_ms": "300"},
            "replica.fetch.wait.max.ms (500) is above replica.lag.time.max.ms (300)",
        ),
    ],
)
def test_refused(settings, message):
    assert message in refusal(**settings)


# What the cores are told.


def test_the_cores_settings_follow():
    config = load(
        broker_session_timeout_ms="6000",
        broker_heartbeat_interval_ms="500",
        kept_stall_ms="1000",
        controller_quorum_fetch_timeout_ms="1000",
        kept_unclean_recovery_wait_ms="7",
        controlled_shutdown_enable="false",
        leader_imbalance_check_interval_seconds="5",
    )
    raft = raft_settings(config)
    assert (raft.election_ticks, raft.heartbeat_ticks) == (20, 2)
    assert raft_settings(load(controller_quorum_fetch_timeout_ms="100")).heartbeat_ticks == 1
    sessions = session_settings(config)
    assert (sessions.session_timeout_ms, sessions.recovery_wait_ms) == (6000, 7)
    assert sessions.heartbeat_interval_ms == 500
    assert sessions.imbalance_check_ms == 5000
    life = lifecycle_settings(config)
    assert (life.heartbeat_interval_ms, life.stall_ms, life.shutdown_timeout_ms) == (500, 1000, 0)


def test_every_configuration_that_is_accepted_suits_the_lifecycle():
    tight = load(
        broker_session_timeout_ms="100", broker_heartbeat_interval_ms="49", kept_stall_ms="50"
    )
    lifecycle_settings(tight)  # raises InvariantViolation where a fenced broker could serve


@pytest.mark.parametrize(("port", "node_port"), [(64_535, 65_535), (64_536, None), (1, 1001)])
def test_a_node_port_is_a_port(port, node_port) -> None:
    given = {
        "listeners": f"PLAINTEXT://a:{port}",
        "node.id": "0",
        "controller.quorum.voters": f"0@a:{node_port or 1},1@b:1,2@c:1",
    }
    if node_port is None:
        with pytest.raises(ConfigurationError, match="leaves no node port"):
            NodeConfig.load(None, given, {})
    else:
        found = NodeConfig.load(None, given, {}).node_listener
        assert found is not None and found.port == node_port


def test_only_a_cluster_of_one_is_told_that_it_has_no_node_listener() -> None:
    given = {"listeners": "PLAINTEXT://a:1", "advertised.listeners": "NODE://a:1"}
    with pytest.raises(ConfigurationError, match="a cluster of one has no node listener unless"):
        NodeConfig.load(None, given, {})
    given["advertised.listeners"] = "OTHER://a:1"
    given["listener.security.protocol.map"] = "OTHER:PLAINTEXT,PLAINTEXT:PLAINTEXT"
    with pytest.raises(ConfigurationError, match="there is no listener OTHER") as refused:
        NodeConfig.load(None, given, {})
    assert "a cluster of one" not in str(refused.value)
