"""What clients used of their quotas: delays, who shares what, and how much is remembered."""

from __future__ import annotations

import pytest

from kept.cluster.security.client_quotas import CLIENT_ID, USER, QuotaEntity, entity
from kept.node.security import client_quotas
from kept.node.security.client_quotas import MAX_DELAY_MS, MAX_VIEWS, ClientQuotas, ClientView
from kept.replication.quota import RateWindow
from kept.storage.errors import ThrottlingQuotaExceeded

ADA = "User:ada"


def quotas_of(**by_entity: dict[str, float]) -> ClientQuotas:
    """Quotas by user, ``_`` for all users and ``client_x`` for a client id."""
    quotas: dict[QuotaEntity, dict[str, float]] = {}
    for name, values in by_entity.items():
        kind = CLIENT_ID if name.startswith("client") else USER
        text = None if name.endswith("_") else name.removeprefix("client_")
        quotas[entity({kind: text})] = values
    made = ClientQuotas()
    made.replace(quotas)
    return made


def view(
    quotas: ClientQuotas, user: str = "ada", client: str = "app", now_ms: int = 0
) -> ClientView:
    return quotas.view(f"User:{user}", client.encode(), now_ms)


def test_the_window_is_ten_samples_and_what_passed_of_the_last() -> None:
    window = RateWindow()
    assert (window.window_ms(5), window.rate(5)) == (10_000, 0)
    window.record(1050, 0)
    assert (window.window_ms(500), window.rate(500)) == (10_500, 100)
    assert window.window_ms(9_999) == 10_999
    window.record(50, 10_500)
    assert (window.window_ms(10_999), round(window.rate(10_999))) == (10_999, 100)
    assert round(window.rate(11_000), 2) == 4.76, "the first sample is over"
    assert window.is_empty(21_500)
    assert RateWindow(samples=1).window_ms(0) == 1


def test_the_delay_brings_the_rate_back_into_the_bound() -> None:
    producer = view(quotas_of(ada={"producer_byte_rate": 100})).producer
    assert producer is not None
    assert producer.record(1000, 0) == 0, "ten seconds' worth"
    assert producer.record(500, 0) == 5000, "(150 - 100) / 100 * 10 s"
    assert producer.delay_ms(4500) == 4500, "the window is 10.5 s long by now"
    assert producer.record(0, 60_000) == 0
    producer.bound = 1e-9
    assert producer.record(1000, 60_000) == MAX_DELAY_MS


def test_a_spike_is_paid_for_as_in_kafka() -> None:
    """ClientQuotaManagerTest's testQuotaViolation, and its numbers."""
    producer = view(quotas_of(client_={"producer_byte_rate": 500}), "ANONYMOUS", "unknown").producer
    assert producer is not None
    assert [producer.record(400, second * 1000) for second in range(10)] == [0] * 10
    assert producer.record(2300, 10_500) == 2100, "(6300 / 10.5 - 500) / 500 * 10.5 s"
    for second in range(13, 23):
        producer.record(400, second * 1000 - 400)
    assert producer.record(0, 22_600) == 0, "the spike has left the window"


@pytest.mark.parametrize("client", ["client@#$%", "<default>", "a:b/c", "\u00e4\u2028", " "])
def test_client_ids_are_names_of_any_kind(client: str) -> None:
    """ClientQuotaManagerTest's testClientIdNotSanitized; none stands for all."""
    quotas = ClientQuotas()
    quotas.replace({entity({CLIENT_ID: client}): {"producer_byte_rate": 100}})
    own = view(quotas, client=client).producer
    assert own is not None and own.bound == 100
    assert view(quotas, client="app").producer is None
    assert view(quotas, client=f"{client}x").producer is None


def test_who_was_not_asked_who_he_is_is_a_user_as_any_other() -> None:
    quotas = quotas_of(ANONYMOUS={"producer_byte_rate": 100}, _={"producer_byte_rate": 200})
    producers = [view(quotas, user).producer for user in ("ANONYMOUS", "ada")]
    assert [producer and producer.bound for producer in producers] == [100, 200]
    of_all = view(quotas_of(_={"producer_byte_rate": 300}), "ANONYMOUS").producer
    assert of_all is not None and of_all.bound == 300


def test_what_would_exceed_the_bound_is_not_counted() -> None:
    consumer = view(quotas_of(ada={"consumer_byte_rate": 100})).consumer
    assert consumer is not None and consumer.window_value == 1000
    assert consumer.record_unless_over(900, 0) == 0
    assert consumer.record_unless_over(600, 0) == 5000
    assert consumer.record_unless_over(100, 0) == 0, "the 600 were not counted"
    assert consumer.record_unless_over(5000, 20_000) == 0, "nothing was used within the window"
    assert consumer.record_unless_over(1, 20_000) > 0


def test_time_of_the_loop_holds_back_for_one_sample_at_most() -> None:
    request = view(quotas_of(ada={"request_percentage": 1})).request
    assert request is not None
    assert request.record(10, 0) == 0, "0.1 s"
    assert request.record(0.5, 0) == 500
    assert request.record(1000, 0) == 1000


def test_changes_of_metadata_draw_on_a_bucket() -> None:
    quotas = quotas_of(ada={"controller_mutation_rate": 2})

    def change(partitions: int, now_ms: int, *, strict: bool = True) -> int:
        mutations = quotas.mutations(ADA, "app", now_ms, strict=strict)
        mutations.record(partitions)
        return mutations.throttle_ms

    assert change(30, 1000) == 0, "the burst is 22: it may be overdrawn once"
    refused = quotas.mutations(ADA, "app", 1000, strict=True)
    with pytest.raises(ThrottlingQuotaExceeded, match="throttling quota has been exceeded"):
        refused.record(1)
    assert refused.throttle_ms == 4000, "8 tokens too many, 2 a second"
    assert change(2, 1000, strict=False) == 5000, "an older version is told afterwards"
    assert change(1, 6000) == 0
    assert change(23, 60_000) == 0, "full again"
    assert quotas.mutations("User:bob", None, 0, strict=True).throttle_ms == 0


def test_who_shares_a_quota_shares_its_meter() -> None:
    rate = {"producer_byte_rate": 100.0}
    for quotas, same, other in (
        (quotas_of(ada=rate), ("ada", "job"), None),
        (quotas_of(client_app=rate), ("bob", "app"), ("ada", "job")),
        (quotas_of(client_=rate), ("bob", "app"), ("ada", "job")),
        (quotas_of(_=rate), ("ada", "job"), ("bob", "app")),
    ):
        mine = view(quotas).producer
        assert mine is not None and view(quotas, *same).producer is mine
        if other is not None:
            assert view(quotas, *other).producer is not mine


def test_a_change_of_quotas_forgives_nothing() -> None:
    quotas = quotas_of(ada={"producer_byte_rate": 100})
    before = view(quotas)
    assert before.producer is not None and before.producer.record(1500, 0) == 5000
    quotas.replace({entity({USER: "ada"}): {"producer_byte_rate": 50}})
    after = view(quotas)
    assert after is not before and after.producer is before.producer
    assert after.producer.delay_ms(0) == 20_000
    quotas.replace({})
    assert not quotas.active and view(quotas).producer is None
    quotas.replace({entity({"ip": "::1"}): {"connection_creation_rate": 5}})
    assert not quotas.active


def test_invented_client_ids_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_quotas, "MAX_VIEWS", 100)
    monkeypatch.setattr(client_quotas, "MAX_UNUSED", 200)
    quotas = quotas_of(client_={"request_percentage": 1}, eve={"producer_byte_rate": 100})
    for number in range(5000):
        invented = view(quotas, "eve", f"id-{number}", number)
        assert invented.producer is not None and invented.request is not None
        assert (invented.producer.record(1, number) > 0) == (number >= 1000)
        assert invented.request.record(20, number) == 1000
    assert len(quotas) == 100
    assert len(quotas._rates) == 100 + 1 + 200, "of eve's clients one quota is shared"
    view(quotas, "eve", "much later", 1_000_000)
    for number in range(30):
        view(quotas, "eve", "id-1", 1_000_000 + number)
        quotas.replace(quotas._quotas)
    assert len(quotas._rates) < 150, "those that held nobody back went"
    assert MAX_VIEWS == 10_000


def test_long_client_ids_fill_no_memory_and_have_quotas_of_their_own() -> None:
    named = "x" * 30_000
    quotas = ClientQuotas()
    quotas.replace(
        {
            entity({CLIENT_ID: None}): {"request_percentage": 1},
            entity({CLIENT_ID: named}): {"request_percentage": 5},
        }
    )
    views = [view(quotas, client=f"{named}{number}") for number in range(10)]
    assert len({id(one.request) for one in views}) == 10, "each has its own"
    (own,) = [one for one in (view(quotas, client=named).request,) if one is not None]
    assert own.bound == 5 and view(quotas, client=named).request is own
    held = [text for _, text in quotas._views] + [key[2].encode() for key in quotas._rates]
    assert len(held) == 22 and max(map(len, held)) < 100


def test_a_change_of_quotas_is_no_work_at_once() -> None:
    quotas = quotas_of(client_={"request_percentage": 1})
    before = [view(quotas, client=f"id-{number}") for number in range(100)]
    quotas.replace({entity({CLIENT_ID: None}): {"request_percentage": 2}})
    assert [one.request.bound for one in before if one.request] == [1] * 100
    assert [view(quotas, client=f"id-{n}").request.bound for n in range(100)] == [2] * 100
    assert len(quotas) == len(quotas._rates) == 100 and not quotas._unused


def test_views_that_nobody_uses_go() -> None:
    quotas = quotas_of(client_={"producer_byte_rate": 100})
    view(quotas, now_ms=3 * client_quotas.IDLE_MS)
    assert len(quotas) == 1, "a machine may have been up for long"
    quotas = quotas_of(client_={"producer_byte_rate": 100})
    first, second = view(quotas, client="a"), view(quotas, client="b")
    assert view(quotas, client="a", now_ms=1000) is first
    view(quotas, client="c", now_ms=client_quotas.IDLE_MS + 1)
    assert len(quotas) == 2 and view(quotas, client="a", now_ms=client_quotas.IDLE_MS) is first
    assert view(quotas, client="b", now_ms=client_quotas.IDLE_MS) is not second
