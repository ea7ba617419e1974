"""The protocol of docs/compaction-protocol.md holds, and each mistake in it is refuted."""

from __future__ import annotations

import pytest

from tests.model import starts
from tests.model.explore import breadth_first, histories
from tests.model.mistakes import recorded, replayed
from tests.model.properties import check, check_liveness
from tests.model.protocol import Mistake, Model, log_end


@pytest.mark.parametrize("mistake", Mistake, ids=lambda m: m.name.lower())
def test_a_mistake_breaks_a_property(mistake: Mistake) -> None:
    assert replayed(mistake).split()[0] == recorded(mistake).breaks


@pytest.mark.parametrize("mistake", Mistake, ids=lambda m: m.name.lower())
def test_the_protocol_survives_that_history(mistake: Mistake) -> None:
    assert replayed(mistake, corrected=True) == ""


@pytest.mark.parametrize(
    "model",
    [Model(half_swaps=False, delayed=False), Model(max_epoch=2)],
    ids=["three epochs", "half-done swaps"],
)
def test_the_protocol_holds_near_the_start(model: Model) -> None:
    result = breadth_first(model, [starts.away()], 6_000)
    assert not result.violation, result
    assert result.states >= 6_000


@pytest.mark.parametrize(
    ("model", "start"),
    [
        (Model(max_epoch=8), starts.AtRandom((8, 7, 3, 40))),
        (Model(max_epoch=8, unclean=True), starts.AtRandom((7, 6, 7, 40))),
        (Model(max_epoch=8, rots=True, parts=True), starts.AtRandom((8, 7, 5, 40))),
        (Model(4, max_epoch=8), starts.AtRandom((7, 6, 4, 40), 4)),
    ],
    ids=["three replicas", "unclean elections", "rot", "four replicas"],
)
def test_the_protocol_holds_in_random_histories(model: Model, start: starts.AtRandom) -> None:
    result = histories(model, start, range(12), 160)
    assert not result.violation, result
    assert result.histories == 12


def test_who_is_complete_enters_before_it_has_applied_what_it_holds() -> None:
    """Without the rule that it refutes mistakes in, the exploration would show nothing."""
    steps = (
        "fetch 1; pull 1 0; publish 0; pass 0 3 True; pull 1 0; publish 0; "
        "propose 0 1; accept; learn_isr 0; pull 1 0; propose 0 3; accept"
    )
    model, state = Model(delayed=False), starts.away()
    for step in steps.split("; "):
        action = next(action for action in model.actions(state) if str(action) == step)
        after = model.step(state, action)
        assert after is not None, step
        state = after
        check(model, state)
    assert state.controller.isr == 0b011
    assert state.replicas[1].held is not state.replicas[1].applied
    for down in (None, *range(model.replicas)):
        check_liveness(model, state, down)


def test_a_member_that_lacks_a_record_leaves_the_isr_before_it_is_cut_and_comes_back() -> None:
    """Its leader answers "not yet" until the controller has decided."""
    steps = "fetch 1; pull 1 0; publish 0; rot 1 1; pull 1 0; propose 0 1; accept; pull 1 0"
    model = Model(rots=True, delayed=False)
    state = starts.away(budget=(0, 1, 1, 3))
    for step in (*steps.split("; "), "learn_isr 0", "pull 1 0", "cut 1"):
        actions = {str(action): action for action in model.actions(state)}
        assert "cut 1" not in actions or step == "cut 1"
        state = model.step(state, actions[step]) or state
        check(model, state)
    assert log_end(state.replicas[1].log) == 1
    for down in (None, *range(model.replicas)):
        check_liveness(model, state, down)


def test_one_seed_is_one_history() -> None:
    model, start = Model(max_epoch=8), starts.AtRandom((8, 7, 3, 40))
    first, second = (histories(model, start, range(5), 100).states for _ in range(2))
    assert first == second
