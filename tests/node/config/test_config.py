"""The node's configuration: where settings come from, what is refused, what follows from what."""

import json
import re
import sys
from pathlib import Path

import pytest

from kept.client.security.tls import DEFAULTS as TLS_SETTINGS
from kept.node.config.config_def import ConfigType, Source
from kept.node.config.definitions import BROKER_SETTINGS, HONOURED, TOPIC_SETTINGS
from kept.node.config.node_config import NodeConfig, attribute
from kept.node.config.sources import MAX_FILE_BYTES, variable
from kept.node.config.unsupported_settings import REFUSED_PREFIXES
from kept.storage.errors import ConfigurationError

ROOT = Path(__file__).parents[3]
KAFKA = json.loads((ROOT / "tests" / "golden" / "kafka_4_3_settings.json").read_text())["brokers"]


def load(**more):
    return NodeConfig.load(**({"environ": {}} | more))


def refusal(**more) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(**more)
    return str(caught.value)


# The table.


def test_every_broker_setting_of_kafka_is_known_or_refused_as_a_family():
    unknown = [
        name
        for name in KAFKA
        if name not in BROKER_SETTINGS and not name.startswith(tuple(REFUSED_PREFIXES))
    ]
    assert unknown == []


DIFFERENT_DEFAULT = {
    "node.id",
    "broker.id",
    "process.roles",
    "listeners",
    "listener.security.protocol.map",
    "log.dir",
    "controller.listener.names",
    "inter.broker.listener.name",
    "metadata.log.max.record.bytes.between.snapshots",
    "group.max.size",
    "ssl.keystore.type",
    "ssl.truststore.type",
    "sasl.enabled.mechanisms",
}
DIFFERENT_TYPE = {"listener.security.protocol.map"}
DIFFERENT_RANGE = {"log.segment.bytes"}


@pytest.mark.parametrize("name", sorted(set(KAFKA) & set(BROKER_SETTINGS)))
def test_type_default_and_update_mode_are_kafkas(name):
    ours, theirs = BROKER_SETTINGS[name], KAFKA[name]
    if name not in DIFFERENT_TYPE:
        assert ours.kind.name.lower() == theirs["type"]
    if name not in DIFFERENT_DEFAULT:
        assert ours.default == theirs["default"]
    if ours.dynamic:
        assert theirs["update"] == "cluster-wide"


@pytest.mark.parametrize("name", sorted(set(KAFKA) & set(HONOURED)))
def test_ranges_allow_no_more_than_kafkas(name):
    bounds = re.fullmatch(r"\[(-?\d+),\.\.\.,?(\d*)\].*", KAFKA[name]["valid"])
    if bounds and name not in DIFFERENT_RANGE | {"offsets.topic.segment.bytes"}:
        setting = HONOURED[name]
        assert setting.low is not None
        assert setting.low >= int(bounds[1])


def test_defaults_parse():
    for setting in BROKER_SETTINGS.values():
        assert setting.parse(setting.default) == setting.parse_default()


def test_attributes_are_typed():
    config = load()
    types = {
        ConfigType.BOOLEAN: bool,
        ConfigType.STRING: str,
        ConfigType.DOUBLE: float,
        ConfigType.LIST: tuple,
    }
    for name, setting in HONOURED.items():
        value = vars(config)[attribute(name)]
        assert type(value) is types.get(setting.kind, int) or value is None, name


def test_what_is_called_honoured_is_read_somewhere():
    """A setting that nothing reads belongs among those accepted without effect."""
    source = "".join(
        path.read_text()
        for folder in ("node", "compaction", "kept/cli")
        for path in (ROOT / folder).rglob("*.py")
    )
    topics = {synonym.name for s in TOPIC_SETTINGS.values() for synonym in s.synonyms}
    unread = [
        name
        for name in HONOURED
        if name not in topics | RESOLVED_AT_LOAD | set(TLS_SETTINGS)
        and not re.search(rf"config(\.current)?\.{attribute(name)}\b", source)
    ]
    assert unread == []


RESOLVED_AT_LOAD = {
    "broker.id",
    "process.roles",
    "controller.quorum.voters",
    "listener.security.protocol.map",
    "inter.broker.listener.name",
    "controller.listener.names",
    "log.dir",
}
"""Settings that only decide what others mean, inside NodeConfig."""


def test_names_do_not_collide():
    assert len({attribute(name) for name in BROKER_SETTINGS}) == len(BROKER_SETTINGS)
    assert len({variable(name) for name in BROKER_SETTINGS}) == len(BROKER_SETTINGS)


def test_documentation_is_up_to_date():
    from kept.node.config.reference_page import document

    assert (ROOT / "docs" / "configuration.md").read_text() == document(), (
        "run: python -m kept.node.config.reference_page > docs/configuration.md"
    )


# A lone node without any setting.


def test_defaults_of_a_lone_node():
    config = load()
    assert [str(listener) for listener in config.listeners] == ["PLAINTEXT://localhost:9092"]
    assert config.listeners[0].bind_hosts == ("127.0.0.1", "::1")
    assert config.advertised_listeners == config.listeners
    assert config.node_listener is None
    assert (config.node_id, config.controller_quorum_voters) == (0, ())
    assert (config.log_dirs, config.metadata_log_dir) == (("./data/log",), "./data/meta")
    assert config.group_initial_rebalance_delay_ms == 0
    assert config.text("group.initial.rebalance.delay.ms") == "0"
    assert config.topic_defaults() == {}
    assert config.auto_create_topics_enable


def test_it_is_frozen():
    config = load()
    with pytest.raises(AttributeError):
        config.node_id = 3


# Sources.


def test_a_file_flat_and_nested(tmp_path):
    file = tmp_path / "kept.yaml"
    file.write_text(
        "log.segment.bytes: 2000000\n"
        "log:\n  retention: {hours: 5}\n  cleanup.policy: [compact, delete]\n"
        "auto.create.topics.enable: false\n"
        "kept: {log.format: json}\n"
        "log.cleaner.min.cleanable.ratio: 0.25\n"
        "broker.rack:\n"
    )
    config = load(file=str(file))
    assert config.log_segment_bytes == 2_000_000
    assert config.log_retention_hours == 5
    assert config.log_cleanup_policy == ("compact", "delete")
    assert config.auto_create_topics_enable is False
    assert config.log_format == "json"
    assert config.broker_rack is None
    assert config.topic_defaults() == {
        "segment.bytes": "2000000",
        "retention.ms": str(5 * 3_600_000),
        "cleanup.policy": "compact,delete",
        "min.cleanable.dirty.ratio": "0.25",
    }


def test_flags_over_environment_over_file(tmp_path):
    file = tmp_path / "kept.yaml"
    file.write_text(
        "num.partitions: 1\nlog.roll.ms: 1\nnum.io.threads: 1\noffset.metadata.max.bytes: 2000\n"
    )
    config = load(
        file=str(file),
        environ={"KEPT_NUM_PARTITIONS": "2", "KEPT_LOG_ROLL_MS": "2", "PATH": "/bin"},
        overrides={"num.partitions": "3"},
    )
    assert (config.num_partitions, config.log_roll_ms, config.offset_metadata_max_bytes) == (
        3,
        2,
        2000,
    )


def test_environment_drops_a_leading_kept():
    assert load(environ={"KEPT_FSYNC_THREADS": "2"}).fsync_threads == 2


def test_what_kubernetes_injects_is_ignored():
    load(
        environ={
            "KEPT_SERVICE_HOST": "10.0.0.1",
            "KEPT_SERVICE_PORT": "9092",
            "KEPT_SERVICE_PORT_KAFKA": "9092",
            "KEPT_PORT": "tcp://10.0.0.1:9092",
            "KEPT_PORT_9092_TCP": "tcp://10.0.0.1:9092",
            "KEPT_PORT_9092_TCP_PROTO": "tcp",
            "KEPT_PORT_9092_TCP_PORT": "9092",
            "KEPT_PORT_9092_TCP_ADDR": "10.0.0.1",
            "KEPT_HEADLESS_SERVICE_HOST": "10.0.0.2",
            "KEPT_HEADLESS_PORT_9092_TCP": "tcp://10.0.0.2:9092",
            "KEPT_HEADLESS_PORT": "tcp://10.0.0.2:9092",
            "KEPT_KERNEL": "python",
            "KEPT_BOOTSTRAP": "localhost:9092",
            "KEPT_CONTEXT": "staging",
            "KEPT_COMMAND_CONFIG": "/home/ada/admin.properties",
            "KEPT_TRACEBACK": "1",
        }
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node.id=3\n", "this looks like a .properties file"),
        ("- a\n", "not a mapping"),
        ("a: [\n", "not YAML: line 2, column 1: "),
        ("a: [b, c\n", "not YAML: line 2, column 1: expected ',' or ']', but got '<stream end>'"),
        ("a:\tb\n\tc: d\n", r"found character '\t' that cannot start any token"),
        ("num.partitions: 1\nnum.partitions: 2\n", "num.partitions is given twice"),
        ("num.partitions: 1\nnum: {partitions: 2}\n", "num.partitions is given twice"),
        ("num.partition: 1\n", "Unknown broker config name: num.partition; did you mean num.part"),
        ("num.partitions: 1970-01-01\n", "num.partitions is a date"),
        ("num.partitions: [[1]]\n", "num.partitions is a list"),
        ("1: 2\n", "1 is not a name"),
        ("{[]: 1, []: 2}\n", "not YAML: line 1, column 2: found unhashable key"),
        ("a: &a {b: *a}\n", "nested too deep, or within itself"),
        pytest.param("[" * 5000, "nested too deep, or within itself", id="deep"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name(tmp_path, text, message):
    file = tmp_path / "kept.yaml"
    file.write_text(text)
    said = refusal(file=str(file))
    assert said.startswith(str(file))
    assert message in said


def test_what_is_not_yaml_is_not_shown(tmp_path):
    """A secret may stand in that line."""
    file = tmp_path / "kept.yaml"
    file.write_text("node.id: 1\nssl.key.password: hunter2: secret\n")
    said = refusal(file=str(file))
    assert "line 2, column 26" in said and "hunter2" not in said


@pytest.mark.parametrize(
    "value", ["*hunter2", "!hunter2 x", "!hunt'er2 x", "!!hunter2 x", "!hunter2!er2 x"]
)
def test_nor_is_a_value_that_yaml_takes_for_something_else(tmp_path, value):
    """An alias or a tag: a password may begin so."""
    file = tmp_path / "kept.yaml"
    file.write_text(f"node.id: 1\nssl.key.password: {value}\n")
    said = refusal(file=str(file))
    assert "line 2, column 19" in said and "stands in quotes" in said
    assert "er2" not in said


@pytest.mark.parametrize(
    "text",
    [
        "ssl.key.password: {hunter2: 1}",
        "ssl.key.password: {hunter2}",
        "ssl.key.password: {hunter2: 1, hunter2: 2}",
        "ssl.key.password: {? [hunter2] : 1}",
        "ssl: {key: {password: {1: {hunter2: 1}}}}",
        "ssl.key: {password: {hunter2: {}}}",
        "listener.name.plaintext.ssl.key.password: {hunter2: 1}",
        "listener.name: {plaintext: {ssl.key.password: {hunter2: 1}}}",
        "<<: {ssl.key.password: {hunter2: [1.5]}}",
        "<<: [{num.partitions: 1}, {ssl: {key.password: {hunter2: [1.5]}}}]",
    ],
)
def test_nor_is_what_stands_in_a_mapping_instead_of_a_secret(tmp_path, text):
    """Braces that are not in quotes: keys are part of the password."""
    file = tmp_path / "kept.yaml"
    file.write_text(f"node.id: 1\n{text}\n")
    said = refusal(file=str(file))
    assert said.startswith(f"{file} line 2: ")
    assert said.endswith("ssl.key.password is a mapping; give text, in quotes")


@pytest.mark.parametrize(
    "value",
    ["!!int hunter2", "!!float hunter2", "!!bool hunter2", "!!timestamp hunter2", "2026-13-01"],
)
def test_nor_is_a_value_that_is_not_of_its_type(tmp_path, value):
    file = tmp_path / "kept.yaml"
    file.write_text(f"node.id: 1\nssl.key.password: {value}\n")
    said = refusal(file=str(file))
    assert said.startswith(f"{file}: not YAML: a value is not of the type") and "er2" not in said


def test_no_file(tmp_path):
    assert "No such file" in refusal(file=str(tmp_path / "absent.yaml"))


def test_a_huge_file_is_not_read(tmp_path):
    file = tmp_path / "kept.yaml"
    file.write_bytes(b"#" * (1 << 21))
    assert "not a configuration" in refusal(file=str(file))


# Settings of one listener.


def test_a_setting_of_a_listener_counts_there_and_nowhere_else():
    config = load(
        overrides={
            "listeners": "PLAINTEXT://localhost:9092,IN_SIDE://localhost:9093",
            "listener.security.protocol.map": "IN_SIDE:PLAINTEXT",
            "ssl.protocol": "TLSv1.3",
            "ssl.keystore.location": "node.pem",
            "listener.name.in_side.ssl.protocol": "TLSv1.2",
            "listener.name.in_side.ssl.key.password": "secret",
        },
        environ={"KEPT_LISTENER_NAME_IN_SIDE_SSL_KEYSTORE_LOCATION": "inside.pem"},
    )
    own, other = config.of_listener("IN_SIDE"), config.of_listener("PLAINTEXT")
    assert (own.ssl_protocol, own.ssl_keystore_location) == ("TLSv1.2", "inside.pem")
    assert (other.ssl_protocol, other.ssl_keystore_location) == ("TLSv1.3", "node.pem")
    assert own.tls_properties()["ssl.enabled.protocols"] == "TLSv1.2,TLSv1.3"
    assert "secret" not in repr(config) and "[hidden]" in repr(config)
    later = config.with_dynamic({"max.connections": "5"}, {})
    assert later.of_listener("IN_SIDE").max_connections == 5
    few = NodeConfig({"listener.name.plaintext.max.connections": "3"})
    changed = few.with_dynamic({"max.connections": "5"}, {})
    assert changed.of_listener("PLAINTEXT").max_connections == 3
    assert changed.text("max.connections") == "5"


# Refusals.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"log.segment.byte": "1"},
            "Unknown broker config name: log.segment.byte; did you mean log.segment.bytes?",
        ),
        (
            {"log.segment.bytes": "1"},
            "Invalid value 1 for configuration log.segment.bytes: Value must be at least 1024",
        ),
        ({"ssl.keystore.passwords": "x"}, "did you mean ssl.keystore.password?"),
        ({"ssl.provider": "x"}, "kept runs no Java classes"),
        (
            {"listener.name.plaintext.ssl.keystore.locations": "x"},
            "did you mean listener.name.plaintext.ssl.keystore.location?",
        ),
        (
            {"listener.name.plaintext.log.dirs": "x"},
            "listener.name.plaintext.log.dirs: log.dirs is no setting of a single listener",
        ),
        (
            {"listener.name.PLAINTEXT.ssl.protocol": "TLSv1.2"},
            "listener.name.<listener in lower case>.<setting> is wanted",
        ),
        (
            {"listener.name.outside.ssl.protocol": "TLSv1.2"},
            "there is no listener OUTSIDE; listeners has PLAINTEXT",
        ),
        (
            {"listener.name.plaintext.ssl.client.auth": "yes"},
            "listener.name.plaintext: Invalid value yes for configuration ssl.client.auth",
        ),
        ({"sasl.kerberos.service.name": "kafka"}, "refused, since GSSAPI needs a KDC"),
        ({"sasl.jaas.config": "x"}, "refused, since clients' listeners have sasl.enabled.mech"),
        ({"authorizer.class.name": "x"}, "kept runs no Java classes: leave it empty, or set org."),
        ({"remote.log.storage.system.enable": "true"}, "no tiered storage"),
        ({"node.id": "1", "broker.id": "2"}, "contradict each other"),
        ({"controller.quorum.voters": "host:1"}, "host:1 is not id@host:port"),
        ({"log.dir": "/a", "log.dirs": "/b"}, "log.dir and log.dirs contradict"),
        ({"log.dirs": "/a,/a/b"}, "overlap"),
        ({"log.dirs": "/a", "metadata.log.dir": "/a/m"}, "contain each other"),
        (
            {"group.min.session.timeout.ms": "9", "group.max.session.timeout.ms": "8"},
            "group.min.session.timeout.ms (9) is above group.max.session.timeout.ms (8)",
        ),
        (
            {"log.cleaner.min.compaction.lag.ms": "9", "log.cleaner.max.compaction.lag.ms": "8"},
            "min.compaction.lag.ms (9) > max.compaction.lag.ms (8)",
        ),
    ],
)
def test_refused(settings, message):
    assert message in refusal(overrides=settings)


def test_an_unknown_variable_is_refused():
    hint = "names no setting; did you mean KEPT_LOG_SEGMENT_BYTES?"
    said = refusal(environ={"KEPT_LOG_SEGMENT_BYTE": "1"})
    assert f"environment variable KEPT_LOG_SEGMENT_BYTE {hint}" in said
    said = refusal(environ={"KEPT_PORT": "9092"})
    assert "environment variable KEPT_PORT names no setting" in said


def test_the_prefix_of_variables_is_no_likeness():
    assert refusal(environ={"KEPT_CLUSTER_ID": "x"}).endswith("KEPT_CLUSTER_ID names no setting")


# Sugar.


def test_port_data_dir_and_node_id():
    config = load(port=9192, data_dir="/d", node_id=4)
    assert str(config.listeners[0]) == "PLAINTEXT://localhost:9192"
    assert (config.log_dirs, config.metadata_log_dir) == (("/d/log",), "/d/meta")
    assert config.node_id == 4


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (
            {"port": 1, "overrides": {"listeners": "PLAINTEXT://localhost:2"}},
            "--port and listeners",
        ),
        ({"data_dir": "/d", "overrides": {"log.dirs": "/e"}}, "--data-dir and log.dirs"),
        ({"data_dir": "/d", "overrides": {"log.dir": "/e"}}, "--data-dir and log.dir"),
        ({"data_dir": "/d", "overrides": {"metadata.log.dir": "/e"}}, "and metadata.log.dir"),
        ({"node_id": 1, "environ": {"KEPT_NODE_ID": "2"}}, "--node-id and node.id"),
        ({"port": 70000}, "--port 70000"),
    ],
)
def test_sugar_beside_what_it_stands_for(given, names):
    assert names in refusal(**given)


def test_metadata_stays_outside_of_the_log_dirs():
    config = load(overrides={"log.dirs": "/disk1/kafka,/disk2/kafka"})
    assert config.metadata_log_dir == "/disk1/kafka-meta"


# Listeners.


def listeners(**settings):
    return load(overrides={name.replace("_", "."): text for name, text in settings.items()})


def test_several_listeners_each_with_its_advertised_address():
    config = listeners(
        listeners="PLAINTEXT://0.0.0.0:9092,outside://[::]:9093",
        advertised_listeners="OUTSIDE://kept.example.org:19093,PLAINTEXT://[fd00::1]:9092",
        listener_security_protocol_map="OUTSIDE:PLAINTEXT",
    )
    assert [str(listener) for listener in config.listeners] == [
        "PLAINTEXT://0.0.0.0:9092",
        "OUTSIDE://[::]:9093",
    ]
    assert [(a.name, a.host, a.port) for a in config.advertised_listeners] == [
        ("PLAINTEXT", "fd00::1", 9092),
        ("OUTSIDE", "kept.example.org", 19093),
    ]


def test_the_listener_between_nodes_is_not_for_clients():
    config = listeners(
        listeners="PLAINTEXT://localhost:9092,CONTROLLER://localhost:10092",
        controller_listener_names="CONTROLLER",
    )
    assert [listener.name for listener in config.listeners] == ["PLAINTEXT"]
    assert config.node_listener is not None
    assert config.node_listener.port == 10092


def test_an_empty_host_binds_all_interfaces():
    config = listeners(
        listeners="PLAINTEXT://:9092", advertised_listeners="PLAINTEXT://localhost:9092"
    )
    assert config.listeners[0].bind_hosts == ("0.0.0.0", "::")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"listeners": "localhost:9092"}, "localhost:9092 is not NAME://host:port"),
        ({"listeners": "PLAINTEXT://localhost:99999"}, "is not NAME://host:port"),
        ({"listeners": "X://localhost:1"}, "no security protocol for listener X"),
        (
            {"listeners": "X://a:1", "listener_security_protocol_map": "X:TLS"},
            "kept serves PLAINTEXT,",
        ),
        ({"listeners": "PLAINTEXT://:9092"}, "advertised.listeners must say"),
        ({"listeners": "PLAINTEXT://a:1,PLAINTEXT://a:2"}, "listener PLAINTEXT is given twice"),
        ({"listeners": "PLAINTEXT://a:1,NODE://a:1"}, "are the same address"),
        ({"listeners": "NODE://a:1"}, "none is left for clients"),
        ({"listeners": ""}, "none is left for clients"),
        (
            {"advertised_listeners": "NODE://a:1"},
            "there is no listener NODE; listeners has PLAINTEXT",
        ),
        ({"advertised_listeners": "PLAINTEXT://0.0.0.0:1"}, "nobody can connect to 0.0.0.0"),
        (
            {"inter_broker_listener_name": "PLAINTEXT", "controller_listener_names": "CONTROLLER"},
            "contradict each other",
        ),
        ({"inter_broker_listener_name": "NODE"}, "listeners has none of that name"),
        ({"controller_listener_names": "A,B"}, "one name is wanted"),
        ({"listener_security_protocol_map": "A"}, "A is not NAME:PROTOCOL"),
        ({"listener_security_protocol_map": "A:PLAINTEXT,a:SSL"}, "a is given twice"),
    ],
)
def test_listeners_refused(settings, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        listeners(**settings)


# Changes at run time.


def test_dynamic_settings_lie_over_static_ones():
    config = load(overrides={"log.segment.bytes": "2000", "log.retention.hours": "1"})
    changed = config.with_dynamic(
        {"log.segment.bytes": "3000"}, {"log.segment.bytes": "4000", "max.connections": "9"}
    )
    assert (config.log_segment_bytes, changed.log_segment_bytes) == (2000, 3000)
    assert changed.max_connections == 9
    assert changed.topic_defaults()["segment.bytes"] == "3000"
    assert [source for source, _ in changed.layers] == [
        Source.DYNAMIC_BROKER_CONFIG,
        Source.DYNAMIC_DEFAULT_BROKER_CONFIG,
        Source.STATIC_BROKER_CONFIG,
    ]
    assert changed.with_dynamic({}, {}).log_segment_bytes == 2000


def test_a_wrong_dynamic_setting_is_refused():
    with pytest.raises(ConfigurationError):
        load().with_dynamic({"log.segment.bytes": "3"}, {})


def test_dynamic_settings_of_a_newer_version_are_passed_over():
    changed = load().with_dynamic({"kept.of.tomorrow": "1", "log.roll.ms": "5"}, {"x": "1"})
    assert changed.dynamic_own == {"log.roll.ms": "5"}
    assert changed.log_roll_ms == 5


def test_text_is_what_is_in_force():
    config = load(overrides={"log.dirs": "/a,/b", "auto.create.topics.enable": "FALSE"})
    assert config.text("log.dirs") == "/a,/b"
    assert config.text("auto.create.topics.enable") == "false"
    assert config.text("broker.rack") is None
    assert config.text("log.retention.hours") == "168"


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    monkeypatch.setenv("KEPT_NUM_PARTITIONS", "7")
    assert NodeConfig.load().num_partitions == 7


def test_yaml_is_only_imported_for_a_file():
    """Start-up budget: a node without a file never loads a YAML parser."""
    import subprocess

    code = (
        "import sys; from kept.node.config.node_config import NodeConfig;"
        "NodeConfig.load(environ={});"
        "sys.exit('yaml' in sys.modules or 'difflib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_empty_log_dirs_and_unknown_kernels_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"log\.dirs is empty"):
        NodeConfig.load(None, {"log.dirs": ""}, {})
    with pytest.raises(ConfigurationError, match="KEPT_KERNEL=foo is not one of python, cython"):
        NodeConfig.load(None, {}, {"KEPT_KERNEL": "foo"})


# Where a refused value came from.


def test_a_refused_value_names_file_and_line(tmp_path):
    file = tmp_path / "kept.yaml"
    file.write_text("# ours\nnode.id: 3\n\nnum:\n  partitions: many\n")
    assert refusal(file=str(file)).startswith(f"{file} line 5: Invalid value many")
    file.write_text("node.id: 3\nnum.partitions: 0\n")
    assert refusal(file=str(file)).startswith(f"{file} line 2: Invalid value 0")
    file.write_text("node.id: 3\nnum.partitons: 1\n")
    assert refusal(file=str(file)).startswith(f"{file} line 2: Unknown broker config name")


def test_a_refused_value_names_variable_or_flag(tmp_path):
    file = tmp_path / "kept.yaml"
    file.write_text("num.partitions: 4\n")
    given = {"file": str(file), "environ": {"KEPT_NUM_PARTITIONS": "few"}}
    assert refusal(**given).startswith("environment variable KEPT_NUM_PARTITIONS: Invalid value")
    more = given | {"overrides": {"num.partitions": "none"}}
    assert refusal(**more).startswith("--set num.partitions: Invalid value none")


def test_a_contradiction_names_both_places(tmp_path):
    file = tmp_path / "kept.yaml"
    file.write_text("node.id: 1\nbroker.id: 2\n")
    said = refusal(file=str(file))
    assert f"(given: node.id by {file} line 1, broker.id by {file} line 2)" in said


@pytest.mark.parametrize(
    ("settings", "is_allowed"),
    [
        ({"group.min.session.timeout.ms": "9", "group.max.session.timeout.ms": "9"}, True),
        ({"group.min.session.timeout.ms": "10", "group.max.session.timeout.ms": "9"}, False),
        ({"replica.fetch.wait.max.ms": "900", "replica.lag.time.max.ms": "900"}, True),
        ({"replica.fetch.wait.max.ms": "901", "replica.lag.time.max.ms": "900"}, False),
        (
            {
                "broker.heartbeat.interval.ms": "1000",
                "kept.stall.ms": "1000",
                "broker.session.timeout.ms": "2001",
            },
            True,
        ),
        (
            {
                "broker.heartbeat.interval.ms": "1000",
                "kept.stall.ms": "1000",
                "broker.session.timeout.ms": "2000",
            },
            False,
        ),
    ],
)
def test_where_times_that_bound_each_other_meet(settings, is_allowed) -> None:
    if is_allowed:
        load(overrides=settings)
    else:
        assert next(iter(settings)) in refusal(overrides=settings)


def test_a_secret_is_not_shown() -> None:
    found = load(overrides={"num.partitions": "3", "ssl.key.password": "hunter2"})
    assert repr(found) == "NodeConfig({'num.partitions': '3', 'ssl.key.password': '[hidden]'})"


def test_the_last_port_is_one() -> None:
    assert load(port=65_535).listeners[0].port == 65_535
    assert "a port is 0 to 65535" in refusal(port=65_536)


def test_a_file_may_be_as_large_as_the_limit(tmp_path) -> None:
    path = tmp_path / "kept.yaml"
    path.write_bytes(b"num.partitions: 3\n".ljust(MAX_FILE_BYTES, b"\n"))
    assert load(file=str(path)).num_partitions == 3
    path.write_bytes(b"num.partitions: 3\n".ljust(MAX_FILE_BYTES + 1, b"\n"))
    assert f"larger than {MAX_FILE_BYTES} bytes" in refusal(file=str(path))


def test_what_inflates_and_one_address_have_a_quarter_of_what_is_in_flight() -> None:
    found = load(overrides={"kept.inflight.max.bytes": str(64 << 20)})
    assert (found.inflating_max_bytes, found.inflight_max_bytes_per_ip) == (16 << 20, 16 << 20)


def test_a_list_of_controllers_is_no_cluster_of_one() -> None:
    name = "controller.quorum.bootstrap.servers"
    assert load(overrides={name: "a:1"}).alone
    assert f"{name} names 2 controllers" in refusal(overrides={name: "a:1,b:1"})
