from __future__ import annotations

import pytest

from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.security.jaas import PLAIN_MODULE
from kept.pipeline.connection import BadOption
from kept.pipeline.options import (
    USES,
    WITHOUT_EFFECT,
    Assign,
    AtOffsets,
    AtTimestamps,
    Subscribe,
    SubscribePattern,
    parse_read,
    parse_write,
)
from kept.storage.types import Codec, IsolationLevel, TopicPartition

WHERE = {"kafka.bootstrap.servers": "localhost:9092"}
READ = {**WHERE, "subscribe": "a"}

EVERY_VALUE = {
    "kafka.bootstrap.servers": "h:1",
    "kafka.client.id": "me",
    "kafka.request.timeout.ms": "1000",
    "kafka.default.api.timeout.ms": "2000",
    "kafka.security.protocol": "PLAINTEXT",
    "subscribe": "a, b",
    "startingOffsets": "earliest",
    "startingOffsetsByTimestampStrategy": "latest",
    "failOnDataLoss": "FALSE",
    "includeHeaders": "true",
    "minPartitions": "7",
    "maxRecordsPerPartition": "100",
    "maxBytesPerPartition": "1000",
    "replica": "2",
    "kafka.isolation.level": "read_committed",
    "kafkaConsumer.pollTimeoutMs": "5000",
    "kafka.fetch.max.wait.ms": "10",
    "kafka.max.partition.fetch.bytes": "4096",
    "kafka.fetch.max.bytes": "1",
    "endingOffsets": "latest",
    "maxOffsetsPerTrigger": "10",
    "minOffsetsPerTrigger": "5",
    "maxTriggerDelay": "2m",
    "topic": "t",
    "kafka.compression.type": "zstd",
    "kafka.batch.size": "1000",
    "includeTimestamps": "true",
    "kafka.acks": "all",
    "kafka.enable.idempotence": "true",
    "checkpointLocation": "/x",
    "queryName": "q",
    "exactlyOnce": "true",
    "ledgerTopic": "l",
    "txnAppId": "a",
    "txnVersion": "3",
}


def test_defaults_are_those_of_the_connector() -> None:
    batch = parse_read(READ, streaming=False)
    assert batch.topics == Subscribe(("a",))
    assert batch.starting == AtOffsets("startingOffsets", EARLIEST)
    assert batch.ending == AtOffsets("endingOffsets", LATEST)
    assert batch.fail_on_data_loss
    assert not batch.include_headers
    assert batch.isolation is IsolationLevel.READ_UNCOMMITTED
    stream = parse_read(READ, streaming=True)
    assert stream.starting == AtOffsets("startingOffsets", LATEST)
    assert stream.ending is None
    assert stream.max_trigger_delay_ms == 15 * 60 * 1000


def test_how_long_the_cluster_may_be_away() -> None:
    for given, patience_ms in (
        ({}, 30_000),
        ({"kafka.request.timeout.ms": "1000"}, 1000),
        ({"kafka.request.timeout.ms": "1000", "kafka.default.api.timeout.ms": "9000"}, 9000),
    ):
        assert parse_read({**READ, **given}, streaming=True).connection.timeout_ms == patience_ms


def test_reading_on_until_it_has_caught_up() -> None:
    on = {**READ, "untilCaughtUp": "true"}
    assert parse_read(on, streaming=False).until_caught_up
    for more, why in (
        ({"endingTimestamp": "5"}, "untilCaughtUp=true and endingTimestamp contradict each other"),
        ({"minPartitions": "5"}, "leave minPartitions out"),
        ({"maxBytesPerPartition": "5"}, "leave maxBytesPerPartition out"),
    ):
        with pytest.raises(BadOption, match=why):
            parse_read({**on, **more}, streaming=False)
    with pytest.raises(BadOption, match="untilCaughtUp is an option of a batch read"):
        parse_read(on, streaming=True)


@pytest.mark.parametrize("use", USES)
def test_every_option_there_is_can_be_given_in_any_case(use: str) -> None:
    given = {n.upper(): EVERY_VALUE[n] for n in USES[use] if n in EVERY_VALUE}
    given |= dict.fromkeys(WITHOUT_EFFECT, "x")
    if use in ("a batch write", "a streaming write"):
        written = parse_write(given, streaming=use == "a streaming write")
        assert written.exactly_once and written.app_id == ("a" if use == "a batch write" else None)
        assert (written.topic, written.codec, written.batch_bytes) == ("t", Codec.ZSTD, 1000)
        assert written.include_timestamps
        return
    read = parse_read(given, streaming=use == "a streaming read")
    assert read.topics == Subscribe(("a", "b"))
    assert (read.min_partitions, read.max_records_per_partition) == (7, 100)
    assert read.isolation is IsolationLevel.READ_COMMITTED
    assert (read.poll_timeout_ms, read.max_wait_ms, read.fetch_bytes) == (5000, 10, 4096)
    assert not read.fail_on_data_loss
    assert read.no_match_is_latest
    if use == "a streaming read":
        assert (read.max_per_trigger, read.min_per_trigger) == (10, 5)
        assert read.max_trigger_delay_ms == 120_000


def test_what_to_read() -> None:
    assert parse_read({**WHERE, "subscribePattern": "a.*"}, streaming=False).topics == (
        SubscribePattern("a.*")
    )
    assigned = parse_read({**WHERE, "assign": '{"b": [1, 0], "a": [2]}'}, streaming=False)
    assert assigned.topics == Assign(
        (TopicPartition("a", 2), TopicPartition("b", 0), TopicPartition("b", 1))
    )


def test_where_to_start_and_end() -> None:
    given = {
        **READ,
        "startingOffsets": '{"a": {"0": 23, "1": -2}}',
        "endingOffsetsByTimestamp": '{"a": {"0": 5, "1": 6}}',
    }
    options = parse_read(given, streaming=False)
    zero, one = TopicPartition("a", 0), TopicPartition("a", 1)
    assert options.starting == AtOffsets("startingOffsets", None, {zero: 23, one: EARLIEST})
    assert options.ending == AtTimestamps("endingOffsetsByTimestamp", None, {zero: 5, one: 6})
    stamp = parse_read({**READ, "startingTimestamp": "1700000000000"}, streaming=True)
    assert stamp.starting == AtTimestamps("startingTimestamp", 1_700_000_000_000)


SSL = {"kafka.security.protocol": "SSL", "kafka.ssl.truststore.location": "/x"}
SASL = {
    "kafka.security.protocol": "SASL_PLAINTEXT",
    "kafka.sasl.mechanism": "PLAIN",
    "kafka.sasl.jaas.config": f'{PLAIN_MODULE} required username="ada" password="do-not-show";',
}
REFUSED = [
    ({"subscribe": "a"}, "kafka.bootstrap.servers is missing"),
    ({**WHERE}, "what to read is missing"),
    ({**READ, "bootstrap": "h:1"}, "kafka.bootstrap.servers and bootstrap: only one"),
    ({**READ, "assign": '{"a": [0]}'}, "subscribe and assign: only one of them can say what"),
    ({**READ, "startingOffsets": "latest"}, "starts at latest"),
    ({**READ, "startingOffsets": '{"a": {"0": -1}}'}, "starts at latest"),
    ({**READ, "endingOffsets": "earliest"}, "ends at earliest"),
    ({**READ, "startingOffsets": "5"}, "startingOffsets is '5'; it must be earliest"),
    ({**READ, "startingOffsets": '{"a": {"0": -3}}'}, "-1 is latest, -2 earliest"),
    ({**READ, "startingOffsets": '{"a": {"x": 1}}'}, "it must be earliest, latest, or JSON"),
    ({**READ, "startingOffsets": '{"a": {"0": true}}'}, "it must be earliest, latest, or JSON"),
    ({**READ, "startingOffsets": "earliest", "startingTimestamp": "1"}, "only one of them"),
    ({**READ, "startingTimestamp": "yesterday"}, "milliseconds since 1970"),
    ({**READ, "startingTimestamp": str(2**63)}, "milliseconds since 1970, up to 922337203685477"),
    ({**READ, "startingOffsetsByTimestamp": f'{{"a": {{"0": {2**63}}}}}'}, "must be JSON such as"),
    ({**READ, "subscrbe": "b"}, "subscrbe is no option of a batch read; did you mean subscribe?"),
    ({**READ, "kafka.sasl.mechanism": "PLAIN"}, "kafka.sasl.mechanism is given, and security.prot"),
    ({**READ, **SSL, "kafka.ssl.truststore.type": "JKS"}, "convert it with: keytool -list -rfc"),
    ({**READ, **SASL, "kafka.sasl.mechanism": "GSSAPI"}, "kafka.sasl.mechanism is GSSAPI which is"),
    ({**READ, **SASL, "kafka.sasl.jaas.config": "X"}, "kafka.sasl.jaas.config: it must begin"),
    ({**READ, **SASL, "kept.command.config": "/x"}, "kept.command.config and kafka.sasl.jaas.conf"),
    ({**READ, "kept.command.config": "/nowhere"}, "kept.command.config: /nowhere: No such file"),
    ({**READ, "minPartitions": "9" * 5000}, "a whole number above 0"),
    ({**READ, "kafka.fetch.max.wait.ms": "9" * 5000}, "from 1 to 2147483647"),
    ({**READ, "startingTimestamp": "9" * 5000}, "milliseconds since 1970"),
    ({**READ, "startingOffsets": f'{{"a": {{"{"9" * 5000}": 1}}}}'}, "JSON such as"),
    ({**READ, "startingOffsets": '{"a":' * 100_000}, "' and so on; it must be earliest, latest"),
    ({**READ, "startingOffsets": '{"a": {"0": 1, "0": 2}}'}, "it must be earliest, latest, or JS"),
    ({**READ, "startingOffsets": '{"a": {"0": 1, "00": 2}}'}, "it must be earliest, latest, or J"),
    ({**READ, "endingOffsets": '{"a": {"0": 1}, "a": {"0": 2}}'}, "it must be earliest, latest"),
    ({**READ, "kafka.client.id": "x" * 40_000}, "and so on; it must be a name of 1 to 200 chara"),
    ({**READ, "replica": str(2**31)}, "the id of a node"),
    ({**READ, "kafka.security.protocol": "TLS"}, "kafka.security.protocol is TLS, which is none"),
    ({**READ, "maxOffsetsPerTrigger": "1"}, "maxOffsetsPerTrigger is an option of a streaming"),
    ({**READ, "kafka.max.partition.fetch.bytes": "3000000000"}, "from 1 to 2147483647"),
    ({**READ, "topic": "b"}, "topic is an option of a batch write"),
    ({**READ, "minPartitions": "0"}, "a whole number above 0"),
    ({**READ, "failOnDataLoss": "yes"}, "true or false"),
    ({**READ, "kafka.isolation.level": "serializable"}, "read_uncommitted or read_committed"),
    ({**WHERE, "subscribe": "a b"}, "a topic's name"),
    ({**WHERE, "subscribe": ","}, "topics, separated by commas"),
    ({**WHERE, "subscribePattern": "("}, "no regular expression"),
    ({**WHERE, "assign": '{"a": [-1]}'}, "JSON such as"),
    ({**READ, "kafka.bootstrap.servers": "host:port"}, "is not host:port"),
]


@pytest.mark.parametrize(("given", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_refused(given: dict[str, str], why: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse_read(given, streaming=False)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({**READ, "endingOffsets": "latest"}, "endingOffsets is an option of a batch read"),
        ({**READ, "maxTriggerDelay": "soon"}, "a time such as 30s, 15m or 1h"),
        ({**READ, "maxTriggerDelay": "9" * 5000}, "a time such as 30s, 15m or 1h"),
        ({**READ, "maxTriggerDelay": "\uff19s"}, "a time such as 30s, 15m or 1h"),
        ({**READ, "minOffsetsPerTrigger": "\uff19"}, "a whole number above 0"),
        (
            {**READ, "minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "5"},
            "minOffsetsPerTrigger is 9, which is above maxOffsetsPerTrigger 5",
        ),
    ],
)
def test_refused_when_streaming(given: dict[str, str], why: str) -> None:
    with pytest.raises(BadOption, match=why):
        parse_read(given, streaming=True)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({**WHERE, "subscribe": "a"}, "subscribe is an option of a batch read"),
        ({**WHERE, "kafka.acks": "1"}, "every record is written with acks=all"),
        ({**WHERE, "kafka.compression.type": "brotli"}, "none, gzip, snappy, lz4 or zstd"),
        ({**WHERE, "kafka.enable.idempotence": "false"}, "idempotent producer"),
        ({**WHERE, "includeHeaders": "perhaps"}, "includeHeaders is 'perhaps'; it must be true or"),
    ],
)
def test_refused_when_writing(given: dict[str, str], why: str) -> None:
    with pytest.raises(BadOption, match=why):
        parse_write(given)


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("250ms", 250), ("30", 30), ("30s", 30_000), ("15 minutes", 900_000), ("1h", 3_600_000)],
)
def test_times(text: str, milliseconds: int) -> None:
    found = parse_read({**READ, "maxTriggerDelay": text}, streaming=True)
    assert found.max_trigger_delay_ms == milliseconds


def test_security_is_given_as_the_jvm_connector_has_it_and_shown_nowhere(tmp_path):
    options = parse_read({**READ, **{n.upper(): v for n, v in SASL.items()}}, streaming=False)
    connection = options.connection
    assert connection.security.user == "ada"
    assert "do-not-show" not in repr(options)
    other = SASL | {"kafka.sasl.jaas.config": SASL["kafka.sasl.jaas.config"].replace("ada", "bob")}
    assert connection == parse_read({**READ, **SASL}, streaming=True).connection
    assert connection != parse_read({**READ, **other}, streaming=False).connection
    file = tmp_path / "client.properties"
    file.write_text("".join(f"{n.removeprefix('kafka.')}={v}\n" for n, v in SASL.items()))
    given = parse_write({**WHERE, "kept.command.config": str(file)}).connection
    assert given.command_config == str(file)
    with given.open() as client:
        assert client.security.user == "ada"
    file.unlink()
    with pytest.raises(BadOption, match=r"kept.command.config: .*No such file"):
        given.open()
