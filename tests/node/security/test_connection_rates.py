"""How many connections a second are accepted, as Kafka's ``ConnectionQuotas`` counts them."""

from __future__ import annotations

import pytest

from kept.cluster.security.client_quotas import CONNECTION_CREATION_RATE, IP, entity
from kept.node.security import connection_rates
from kept.node.security.connection_rates import UNLIMITED, ConnectionRates


def rates_of(**by_address: float) -> ConnectionRates:
    """Quotas by address, ``_`` for all addresses without one."""
    rates = ConnectionRates()
    rates.replace(
        {
            entity({IP: None if host == "_" else host.replace("_", ".")}): {
                CONNECTION_CREATION_RATE: bound
            }
            for host, bound in by_address.items()
        }
    )
    return rates


def test_ten_samples_worth_is_accepted_at_once_and_then_one_after_another() -> None:
    rates = ConnectionRates()
    assert [rates.record(0, 10) for _ in range(100)] == [0] * 100
    assert rates.record(0, 10) == 100, "(10.1 - 10) / 10 * 10 s"
    assert rates.record(100, 10) == 100
    assert rates.record(100, 10, "OUT") == 0, "a listener's rate is its own"
    assert rates.record(100, 1) == 1000, "one sample at most"
    assert rates.record(100, 0) == 1000, "none a second are one in each sample"
    assert rates.record(100, UNLIMITED) == 0


def test_an_address_has_its_quota_or_that_of_all() -> None:
    rates = rates_of(_=1, **{"10_0_0_1": 5})
    assert [rates.record_address(0, "10.0.0.1") for _ in range(50)] == [0] * 50
    assert rates.record_address(0, "10.0.0.1") == 200
    assert rates.record_address(0, "10.0.0.1") == 200, "one that is closed does not count"
    assert rates.record_address(200, "10.0.0.1") == 0
    assert [rates.record_address(0, "::1") for _ in range(11)] == [0] * 10 + [1000]
    rates.replace({})
    assert rates.record_address(0, "::1") == 0


@pytest.mark.parametrize(
    ("written", "comes"),
    [
        ("0:0:0:0:0:0:0:1", "::1"),
        ("2001:DB8::1", "2001:db8::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
    ],
)
def test_a_quota_is_for_its_address_however_that_is_written(written: str, comes: str) -> None:
    """Kafka's tools send the text that was typed; Kafka resolves it."""
    rates = ConnectionRates()
    one, other = entity({IP: written}), entity({IP: comes})
    rates.replace({one: {CONNECTION_CREATION_RATE: 1.0}})
    assert [rates.record_address(0, comes) for _ in range(11)] == [0] * 10 + [1000]
    rates.replace({one: {CONNECTION_CREATION_RATE: 1.0}, other: {CONNECTION_CREATION_RATE: 5.0}})
    assert rates.record_address(0, comes) > 0, "the lower of two for one address"
    rates.replace({other: {CONNECTION_CREATION_RATE: 5.0}})
    assert rates.record_address(0, comes) == 0


def test_no_more_addresses_are_remembered_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_rates, "MAX_ADDRESSES", 100)
    rates = rates_of(_=1)
    for number in range(300):
        rates.record_address(0, f"2001:db8::{number:x}")
        rates.record_address(0, "10.0.0.1")
    assert len(rates._of_addresses) == 100
    assert rates.record_address(0, "10.0.0.1") > 0, "it connects all the time"
