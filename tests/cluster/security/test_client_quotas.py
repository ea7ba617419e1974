"""Client quotas: which one counts, what may be set, which entities a filter finds."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.cluster.controller.client_quota_changes import alter_client_quotas
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import ClientQuotaRecord
from kept.cluster.security.client_quotas import (
    CLIENT_ID,
    IP,
    USER,
    Alteration,
    EffectiveQuota,
    FilterComponent,
    QuotaEntity,
    Quotas,
    check_alteration,
    check_filter,
    describe_entity,
    effective_quota,
    entity,
    matches,
)
from kept.steps import run_to_end
from kept.storage.errors import InvalidRequest, UnsupportedVersion

ANY = "(none)"
"""Stands for a type that an entity does not have."""
ENTITIES = [
    entity({kind: name for kind, name in ((USER, user), (CLIENT_ID, client)) if name != ANY})
    for user, client in product(("ada", "bob", None, ANY), ("app", "job", None, ANY))
    if (user, client) != (ANY, ANY)
]
KEYS = ("producer_byte_rate", "request_percentage")

PRECEDENCE = (
    # user, client id, who shares the rate: the most specific entity first (KIP-55)
    ("ada", "app", "ada", "app"),
    ("ada", None, "ada", "app"),
    ("ada", ANY, "ada", ""),
    (None, "app", "ada", "app"),
    (None, None, "ada", "app"),
    (None, ANY, "ada", ""),
    (ANY, "app", "", "app"),
    (ANY, None, "", "app"),
)


def naive(quotas: Quotas, key: str, user: str, client_id: str) -> EffectiveQuota | None:
    """The one of all quotas that fit that stands first in the table of precedence."""
    best, rank = None, len(PRECEDENCE)
    for of, values in quotas.items():
        names = dict(of)
        fits = key in values and all(
            names.get(kind, ANY) in {wanted, None, ANY}
            for kind, wanted in ((USER, user), (CLIENT_ID, client_id))
        )
        if CLIENT_ID in names and not client_id:
            fits = False
        row = tuple(
            {wanted: mine, None: None, ANY: ANY}[names.get(kind, ANY)] if fits else ""
            for kind, wanted, mine in ((USER, user, "ada"), (CLIENT_ID, client_id, "app"))
        )
        for place, (for_user, for_client, shared_user, shared_client) in enumerate(PRECEDENCE):
            if row == (for_user, for_client) and place < rank:
                rank = place
                best = EffectiveQuota(
                    values[key], shared_user and user, shared_client and client_id
                )
    return best


@given(
    st.dictionaries(
        st.sampled_from(ENTITIES),
        st.dictionaries(st.sampled_from(KEYS), st.floats(1, 100), min_size=1),
    ),
    st.sampled_from(KEYS),
    st.sampled_from(("ada", "bob", "eve")),
    st.sampled_from(("app", "job", "other", "")),
)
def test_the_most_specific_quota_counts(
    quotas: dict[QuotaEntity, dict[str, float]], key: str, user: str, client_id: str
) -> None:
    assert effective_quota(quotas, key, user, client_id) == naive(quotas, key, user, client_id)


def test_each_place_of_the_precedence_is_reached() -> None:
    quotas: dict[QuotaEntity, dict[str, float]] = {}
    for bound, (user, client, shared_user, shared_client) in reversed([*enumerate(PRECEDENCE, 1)]):
        names = {kind: name for kind, name in ((USER, user), (CLIENT_ID, client)) if name != ANY}
        quotas[entity(names)] = {KEYS[0]: bound}
        expected = EffectiveQuota(bound, shared_user, shared_client)
        assert effective_quota(quotas, KEYS[0], "ada", "app") == expected
    assert effective_quota(quotas, KEYS[1], "ada", "app") is None


@pytest.mark.parametrize(
    ("names", "key", "value", "why"),
    [
        ({}, KEYS[0], 1, "Invalid empty client quota entity"),
        ({"group": "g"}, KEYS[0], 1, "Unhandled client quota entity type: group"),
        ({USER: ""}, KEYS[0], 1, "Empty user not supported"),
        ({USER: "x" * 32_768}, KEYS[0], 1, "exceeds 32767 bytes"),
        ({IP: "10.0.0.1", USER: "ada"}, "connection_creation_rate", 1, "not.*be combined"),
        ({IP: "localhost"}, "connection_creation_rate", 1, "localhost is not a valid IP"),
        ({IP: "10.0.0.1"}, KEYS[0], 1, "Invalid configuration key producer_byte_rate"),
        ({USER: "ada"}, "connection_creation_rate", 1, "Invalid configuration key connection_"),
        ({USER: "ada"}, KEYS[0], 0, "must be greater than 0"),
        ({USER: "ada"}, KEYS[0], -1.5, "must be greater than 0"),
        ({USER: "ada"}, KEYS[0], 1.5, "producer_byte_rate cannot be a fractional value"),
        ({USER: "ada"}, KEYS[0], 2.0**64, "too large for a LONG"),
        ({IP: None}, "connection_creation_rate", 2**31, "too large for an INT"),
        ({USER: "ada"}, KEYS[1], math.nan, "must be a finite number"),
        ({USER: "ada"}, "controller_mutation_rate", math.inf, "must be a finite number"),
    ],
)
def test_what_may_not_be_set(
    names: dict[str, str | None], key: str, value: float, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        check_alteration(Alteration(entity(names), [(key, value)]))


def test_what_may_be_set() -> None:
    for names, key, value in (
        ({USER: "ada", CLIENT_ID: None}, KEYS[0], 1048576.0),
        ({USER: None}, KEYS[1], 0.5),
        ({CLIENT_ID: "app"}, "controller_mutation_rate", 0.1),
        ({IP: "2001:db8::1"}, "connection_creation_rate", 2**31 - 1),
        ({USER: "ada"}, "no_such_key", None),
    ):
        check_alteration(Alteration(entity(names), [(key, value)]))


@pytest.mark.parametrize(
    ("components", "why"),
    [
        ([("", 0, "x")], "Invalid empty entity type"),
        ([(USER, 0, "x"), (USER, 2, None)], "user cannot appear more than once"),
        ([("group", 0, "x")], "Unsupported entity type group"),
        ([(USER, 0, None)], "MATCH_TYPE_EXACT, but set match string to null"),
        ([(USER, 1, "x")], "MATCH_TYPE_DEFAULT, but also specified a match string"),
        ([(USER, 2, "x")], "MATCH_TYPE_SPECIFIED, but also specified a match string"),
        ([(USER, 3, None)], "Unknown match type 3"),
        ([(USER, 2, None), (IP, 2, None)], "IP filter component should not be used"),
    ],
)
def test_filters_that_are_none(components: list[tuple[str, int, str | None]], why: str) -> None:
    kind = UnsupportedVersion if "Unsupported" in why else InvalidRequest
    with pytest.raises(kind, match=why):
        check_filter([FilterComponent(*component) for component in components])


@pytest.mark.parametrize(
    ("components", "strict", "found"),
    [
        ([], False, {"ada", "ada app", "*", "* *", "app"}),
        ([], True, set()),
        ([(USER, 0, "ada")], False, {"ada", "ada app"}),
        ([(USER, 0, "ada")], True, {"ada"}),
        ([(USER, 1, None)], False, {"*", "* *"}),
        ([(USER, 2, None)], True, {"ada", "*"}),
        ([(USER, 2, None), (CLIENT_ID, 2, None)], True, {"ada app", "* *"}),
        ([(CLIENT_ID, 0, "app")], False, {"ada app", "app"}),
        ([(CLIENT_ID, 0, "app")], True, {"app"}),
        ([(IP, 2, None)], False, set()),
    ],
)
def test_what_filters_find(
    components: list[tuple[str, int, str | None]], strict: bool, found: set[str]
) -> None:
    entities = {
        "ada": entity({USER: "ada"}),
        "ada app": entity({USER: "ada", CLIENT_ID: "app"}),
        "*": entity({USER: None}),
        "* *": entity({USER: None, CLIENT_ID: None}),
        "app": entity({CLIENT_ID: "app"}),
    }
    wanted = [FilterComponent(*component) for component in components]
    check_filter(wanted)
    assert found == {name for name, of in entities.items() if matches(wanted, strict=strict, of=of)}


def test_entities_in_words() -> None:
    assert describe_entity(entity({USER: "ada", CLIENT_ID: None})) == (
        "client-id <default>, user 'ada'"
    )


def test_alterations_become_records_of_what_changes() -> None:
    ada, app = entity({USER: "ada"}), entity({CLIENT_ID: "app"})
    image, _ = Image().apply([ClientQuotaRecord(ada, KEYS[0], 100.0)])
    results, records = run_to_end(
        alter_client_quotas(
            image,
            [
                Alteration(ada, [(KEYS[0], 100.0), (KEYS[1], 1.0), ("none", None)]),
                Alteration(app, [(KEYS[0], 5.0), (KEYS[1], -1.0)]),
                Alteration(entity({CLIENT_ID: "twice"}), [(KEYS[0], 5.0), (KEYS[0], 6.0)]),
                Alteration(ada, [(KEYS[0], 1.0)]),
                Alteration(entity({USER: None}), [(KEYS[0], 7.0)]),
            ],
        )
    )
    assert records == [
        ClientQuotaRecord(ada, KEYS[1], 1.0),
        ClientQuotaRecord(((USER, None),), KEYS[0], 7.0),
    ]
    assert {describe_entity(of): error and str(error) for of, error in results.items()} == {
        "user 'ada'": "Ignoring duplicate entity user 'ada'",
        "client-id 'app'": "Quota request_percentage must be greater than 0",
        "client-id 'twice'": "Ignoring duplicate entity client-id 'twice'",
        "user <default>": None,
    }
    image, _ = image.apply(records)
    _, records = run_to_end(
        alter_client_quotas(image, [Alteration(ada, [(KEYS[0], None), (KEYS[1], None)])])
    )
    image, delta = image.apply(records)
    assert image.quotas == {((USER, None),): {KEYS[0]: 7.0}} and delta.quotas == {ada}
