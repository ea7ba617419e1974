from __future__ import annotations

import os
import subprocess
import sys
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.cluster.metadata.persistent_map import SHARDS, PersistentMap, changed_keys, shard_of

keys = st.integers(0, 600) | st.text(max_size=3) | st.uuids() | st.tuples(st.uuids(), st.integers())
edits = st.lists(st.lists(st.tuples(keys, st.none() | st.integers()), max_size=20), max_size=6)


@given(edits)
def test_it_is_a_dict_and_old_ones_stay(history) -> None:
    current, model = PersistentMap(), {}
    versions = [(current, model)]
    for batch in history:
        draft, model = current.edit(), dict(model)
        for key, value in batch:
            if value is None:
                assert draft.pop(key, "none") == model.pop(key, "none")
            else:
                draft[key] = model[key] = value
            assert (key in draft) == (key in model) and draft.get(key) == model.get(key)
        assert len(draft) == len(model) and dict(draft) == model
        current = draft.finish()
        versions.append((current, model))
    for found, expected in versions:
        assert found == expected and len(found) == len(expected) and dict(found) == expected
        assert all(found[key] == value and key in found for key, value in expected.items())


def test_what_is_not_there() -> None:
    empty = PersistentMap()
    assert empty.get("a") is None and "a" not in empty and list(empty) == []
    with pytest.raises(KeyError):
        empty["a"]
    with pytest.raises(KeyError):
        del empty.edit()["a"]
    with pytest.raises(TypeError, match="float"):
        shard_of(1.5)


def test_a_successor_shares_what_was_not_touched() -> None:
    draft = PersistentMap().edit()
    for number in range(10_000):
        draft[number] = number
    full = draft.finish()
    draft = full.edit()
    draft[7] = -1
    after = draft.finish()
    shared = [a is b for a, b in zip(full._shards, after._shards, strict=True)]
    assert shared.count(False) == 1 and full[7] == 7 and after[7] == -1


@given(edits)
def test_what_changed_is_what_two_dicts_would_say(history) -> None:
    """Also between maps of which one is not made of the other, and dicts."""
    current, versions = PersistentMap(), [PersistentMap()]
    for batch in history:
        draft = current.edit()
        for key, value in batch:
            if value is None:
                draft.pop(key, None)
            else:
                draft[key] = value
        current = draft.finish()
        versions.append(current)
    for before in versions:
        for after in versions:
            every = {**before, **after}
            expected = {key for key in every if before.get(key) != after.get(key)}
            assert changed_keys(before, after) == expected
            assert changed_keys(dict(before), after) == expected


class Compared:
    """Counts how often values are."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return self is other

    __hash__ = None  # type: ignore[assignment]


def test_what_changed_is_found_without_a_look_at_the_rest() -> None:
    draft = PersistentMap().edit()
    for number in range(10_000):
        draft[number] = Compared()
    full = draft.finish()
    draft = full.edit()
    draft[7] = Compared()
    after = draft.finish()
    assert changed_keys(full, after) == {7}
    assert 0 < Compared.times <= 10_000 // SHARDS + 1


def test_keys_spread() -> None:
    for made in (
        [UUID(int=n) for n in range(5000)],
        [UUID(int=n << 16) for n in range(5000)],
        [f"topic-{n}" for n in range(5000)],
        [(UUID(int=9), n) for n in range(5000)],
    ):
        sizes = [0] * SHARDS
        for key in made:
            sizes[shard_of(key)] += 1
        assert max(sizes) < 3 * 5000 / SHARDS


def test_the_order_is_the_same_in_every_process() -> None:
    """Decisions iterate over maps: one seed, one history."""
    program = (
        "from kept.cluster.metadata.persistent_map import PersistentMap\n"
        "draft = PersistentMap().edit()\n"
        "for n in range(300): draft[f'topic-{n}'] = n\n"
        "print(list(draft.finish()))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
