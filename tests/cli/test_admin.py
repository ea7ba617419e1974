"""Commands of administrators that need no more than Kafka's protocol: each test runs against kept,
and against Apache Kafka.
"""

from __future__ import annotations

from tests.cli.conftest import Kept


def test_quotas_from_the_first_to_the_last(either: Kept) -> None:
    ada = ("--user", "quota-ada")
    said = either("quota", "set", *ada, "--producer-byte-rate", "1MiB", "--consumer-byte-rate", 500)
    assert said.out == (
        "set for user quota-ada: producer_byte_rate 1048576 B/s (1.0 MiB/s), "
        "consumer_byte_rate 500 B/s\n"
    )
    either("quota", "set", *ada, "--client-id-default", "--request-percentage", 150)
    either("quota", "set", "--ip", "10.1.2.3", "--connection-creation-rate", 5)
    assert either("quota", "list", *ada, "--json").json == [
        {
            "entity": {"client-id": None, "user": "quota-ada"},
            "quotas": {"request_percentage": 150.0},
        },
        {
            "entity": {"user": "quota-ada"},
            "quotas": {"consumer_byte_rate": 500.0, "producer_byte_rate": 1048576.0},
        },
    ]
    rows = [line.split() for line in either("quota", "list").lines]
    assert ["quota-ada", "(default)", "-", "request_percentage", "150", "%"] in rows
    assert ["-", "-", "10.1.2.3", "connection_creation_rate", "5/s"] in rows

    described = either("quota", "describe", *ada, "--client-id", "app").lines
    assert [line.split("  ")[-1].strip() for line in described[1:]] == [
        "user quota-ada", "user quota-ada", "user quota-ada, client id (default)", "-",
    ]  # fmt: skip
    assert either("quota", "describe", "--ip", "10.1.2.3", "--json").json == [
        {"quota": "connection_creation_rate", "value": 5.0, "entity": {"ip": "10.1.2.3"}}
    ]

    one = ("quota", "delete", *ada, "--quota", "consumer_byte_rate")
    assert either(*one).out == "deleted of user quota-ada: consumer_byte_rate 500 B/s\n"
    assert "user quota-ada has no consumer_byte_rate" in either(*one, status=1).err
    either("quota", "delete", *ada)
    either("quota", "delete", *ada, "--client-id-default")
    either("quota", "delete", "--ip", "10.1.2.3")
    assert "kept quota list shows" in either("quota", "delete", *ada, status=1).err
    assert either("quota", "list", *ada, "--json").json == []


def test_quotas_that_there_are_not_are_wrong_usage(offline: Kept) -> None:
    for arguments, said in {
        ("--user", "a", "--connection-creation-rate", "4"): "no quota of users and client ids",
        ("--ip", "10.0.0.1", "--producer-byte-rate", "4"): "no quota of an address",
        ("--user", "a", "--producer-byte-rate", "4zz"): "'4zz' is no number of bytes a second",
        ("--ip", "somewhere", "--connection-creation-rate", "4"): "'somewhere' is no address",
        ("--producer-byte-rate", "4"): "whose? Give --user",
        ("--user", "a"): "nothing to set",
        ("--user", "a", "--user-default", "--producer-byte-rate", "4"): "contradict each other",
        ("--user", "a", "--ip", "10.0.0.1", "--producer-byte-rate", "4"): "no user or client id",
        ("--user", "", "--producer-byte-rate", "4"): "--user '' names nobody",
        ("--user", "a", "--request-percentage", "0"): "not in the range",
    }.items():
        assert said in offline("quota", "set", *arguments, status=2).err


def test_settings_of_brokers(either: Kept) -> None:
    name, other = "log.cleaner.backoff.ms", "log.retention.ms"
    described = ("broker", "config", "describe", "--name", name, "--json")
    (number,) = {row["broker"] for row in either(*described).json} - {"default"}
    before = either(*described).json

    both = ("broker", "config", "set", number, "default", "--config", f"{name}=14000")
    ran = either(*both, "--dry-run")
    assert ran.lines == [
        f"broker {number}: {name}=14000 (dry run)", f"all brokers: {name}=14000 (dry run)",
    ]  # fmt: skip
    assert either(*described).json == before
    assert either(*both).lines == [f"broker {number}: {name}=14000", f"all brokers: {name}=14000"]
    by_broker = {row["broker"]: row for row in either(*described).json}
    assert by_broker[number] == {
        "broker": number, "name": name, "value": "14000", "source": "broker (dynamic)",
        "dynamic": True, "sensitive": False,
    }  # fmt: skip
    assert by_broker["default"]["source"] == "cluster default (dynamic)"

    either("broker", "config", "delete", number, "--name", name)
    by_broker = {row["broker"]: row for row in either(*described).json}
    assert by_broker[number]["source"] == "cluster default (dynamic)"
    either("broker", "config", "delete", "default", "--name", name)
    assert either(*described).json == before

    shown = either("broker", "config", "describe", number).lines
    assert shown[0].split() == ["BROKER", "NAME", "VALUE", "SOURCE", "DYNAMIC"]
    assert not any(line.split()[1:2] == [name] for line in shown)
    everything = either("broker", "config", "describe", number, "--all").lines
    assert any(line.split()[1] == name and line.split()[-2:] == ["default", "yes"]
               for line in everything)  # fmt: skip

    near = f"there is no broker setting {name}s; did you mean {name}?"
    for arguments in (("set", number, "--config", f"{name}s=1"), ("describe", "--name", f"{name}s"),
                      ("delete", number, "--name", f"{name}s")):  # fmt: skip
        assert near in either("broker", "config", *arguments, status=1).err
    said = either("broker", "config", "set", "77", "--config", f"{name}=1", status=1).err
    assert f"there is no broker 77; those that answer: {number}" in said
    refused = ("broker", "config", "set", number, "default", "--config", f"{name}=14000",
               "--config", f"{other}=soon")  # fmt: skip
    ran = either(*refused, status=1, errors=3)
    assert ran.err.count("Invalid value soon for configuration log.retention.ms") == 2
    assert "no broker was changed" in ran.err
    assert either(*described).json == before
    assert "neither the id of a broker" in either("broker", "config", "describe", "x", status=2).err


def test_secrets_of_brokers_are_not_shown(either: Kept) -> None:
    rows = either("broker", "config", "describe", "--all", "--json").json
    secret = [row["name"] for row in rows if row["sensitive"]]
    assert "ssl.keystore.password" in secret
    assert not any(row["value"] for row in rows if row["sensitive"])
    shown = either("broker", "config", "describe", "--all").lines
    line = next(line for line in shown if " ssl.keystore.password " in line)
    assert "(hidden)" in line
