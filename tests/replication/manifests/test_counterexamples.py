"""The counterexamples of the rules' model on the real cores: with the rule they are harmless, with
the rule taken out they break the property named.

0 leads at first, 1 is in the ISR with everything, 2 is who was away: it has ``a`` and not its
tombstone.
"""

from __future__ import annotations

import pytest

from tests.replication.manifests.checks import check_liveness
from tests.replication.manifests.logs import Violation
from tests.replication.manifests.planted import PLANTED, Planted
from tests.replication.manifests.script import run
from tests.replication.manifests.world import World

AWAY = """
learn; put 0 a; fetch 1 2; fetch 2 2; crash 2; fence 2; learn
del 0 a; put 0 b; fetch 1 3
"""

SCRIPTS = {
    "confirmed ISR only (C1)": """S1 away
        put 0 b; late; decide 0; learn          # 1 lags and leaves
        fetch 1 2                               # and is proposed again
        pass 0 3; swap 0                        # published to 0 alone?
        restart 2; learn; fetch 2 4             # over the tombstone
        decide 0; elect 1; learn                # 1 never heard of it
        fetch 2 2; fetch 0 2; decide 1; learn
        """,
    "uncommitted shrink counted (C1)": """S1 away
        put 0 b; late                           # 0 asks to drop 1
        pass 0 3; swap 0
        restart 2; learn 2; learn 0; fetch 2 4
        elect 1; learn                          # but nobody had decided
        fetch 2 4; fetch 0 2; decide 1; learn
        """,
    "act before publication (C2)": """S1 away
        pass 0 3; swap 0; restart 2; learn; fetch 2 4
        elect 1; learn; fetch 2 3; decide 1; learn
        """,
    "discard (C3)": """S1 away
        pass 0 3; pull 1; ask 1; heard 1; swap 0  # 1 holds it, and did not hear more
        restart 2; learn; fetch 2 3
        elect 1; learn; fetch 2 3; decide 1; learn
        """,
    "admit early (C4)": """S1 away
        pass 0 3; pull 1; ask 1; heard 1; swap 0
        restart 2; learn; fetch 2 3
        elect 1; learn; fetch 2 3; decide 1; learn
        """,
    "trust (C5)": """S5
        learn; put 0 a; del 0 a; put 0 b; fetch 1 4; fetch 2 4; fetch 0
        pass 0 3; pull 1                        # 1 holds it, 2 does not
        elect 1; learn; swap 1
        elect 2; learn; fetch 1 2; fetch 0 2
        pass 2 3 keep; pull 0; pull 1; pull 0; pull 1; swap 2
        pull 1; swap 1                          # 2's says that the tombstone stays
        """,
    "below LEO (C6)": """S away
        wipe 2; restart 2; learn; pass 0 3; pull 1; pull 1
        fetch 2; pull 2; pull 2; swap 2; fetch 2 # one record of before
        swap 0; fetch 2 3; pull 2; pull 2; fetch 2 2; decide 0; learn
        """,
    "generation with batches (C7)": """S
        learn; put 0 b; fetch 1 2; crash 2; fence 2; wipe 2; learn
        put 0 a; del 0 a; put 0 b; fetch 1 5
        pass 0 3; pull 1; ask 1; heard 1; swap 0
        restart 2; learn; fetch 2               # b, from the one that swapped
        elect 1; learn; fetch 2                 # a, from the one that has not
        fetch 0; pull 0; pull 0; swap 1; fetch 2 4; pull 2; fetch 2; decide 1; learn
        """,
    "dirty range (C8)": """S
        learn; put 0 a; put 0 a; fetch 1 3; fetch 2 3
        pass 0 2; pull 1; pull 2; pull 1; ask 2; heard 2; swap 0; lose 2
        put 0 b; put 0 b; fetch 1 3; fetch 2 3
        pass 0 4; pull 1; pull 2; pull 1; ask 2; heard 2; swap 0
        crash 2; restart 2; learn; fetch 2; pull 2; pull 2; swap 2   # never was at the first
        """,
    "number only (C9)": """S
        learn; put 0 a; del 0 a; put 0 b; fetch 1 4; fetch 2 4; fetch 1; fetch 2
        pass 0 3; elect 1; learn; fetch 0 2; fetch 2 2
        pass 1 3 keep; pull 2; pull 0; pull 2; pull 0; swap 1; pull 0; pull 0; swap 0
        """,
    "log end at the answer (C10)": """S5
        learn; put 0 a; fetch 1 2; fetch 2 2; crash 2; fence 2; learn
        put 0 b; del 0 a; fetch 1 3
        pass 0 3 keep; pull 1; pull 1; swap 0; pull 1; swap 1; pull 1
        put 0 b; fetch 1 2
        restart 2; learn; fetch 2; ask 2; heard 2   # 2 ends below b
        pass 0 4; pull 1; pull 1; swap 0; fetch 2 3 # from one that is further
        answer 2; store 2; swap 2
        """,
    "apply before truncating (C11)": """S1
        learn; put 0 a; fetch 1 2; fetch 2 2; elect 2; learn
        fetch 0; fetch 1; put 2 b; crash 2; elect 1; fence 2; learn    # b is on 2 only
        fetch 0; del 1 a; put 1 b; fetch 0 4; late; decide 1; learn; fetch 0
        pass 1 2; pull 0; pull 0
        restart 2; learn; pull 2; pull 2; swap 2; pull 2   # before it knows that it has parted
        fetch 2; fetch 2; swap 1; fetch 2 4; decide 1; learn
        """,
    "descending swap (C12)": """S1
        learn; put 0 a; del 0 a; put 0 b; fetch 1 4; fetch 2 4
        pass 0 3; pull 1; pull 2; pull 1; pull 2; part 0 1; part 0 2
        """,
    "HW below b (C13)": """S7
        learn; put 0 a; fetch 1 2; fetch 2 2; crash 2; fence 2; learn
        pass 0 1; pull 1; pull 1; swap 0; pull 1; swap 1
        put 0 b; put 0 a; fetch 1 3; pass 0 3; pull 1
        crash 1; restart 1; elect 1; learn      # it knows as much as g1 told it
        pull 0; pull 0; swap 1
        """,
    "apply on persist (C14)": """S5
        learn; put 0 a; del 0 a; put 0 b; fetch 1 4; fetch 2 4; fetch 1
        pass 0 3; pull 2; pull 2; swap 2
        elect 1; learn; fetch 0 2; fetch 2 2
        pass 1 3 keep; pull 0; pull 2; pull 0; pull 2; swap 1; swap 2
        """,
    "late result of an old pass": """S5
        learn; put 0 a; del 0 a; put 0 b; fetch 1 4; fetch 2 4; fetch 1
        compute 0 3 keep; elect 1; learn; fetch 0 2; fetch 2 2
        pass 1 3; pull 0; pull 2; pull 0; pull 2; swap 1; pull 0; swap 0; pull 2; swap 2
        elect 0; learn; fetch 1 2; fetch 2 2; pull 1; pull 2; pull 1; pull 2
        end_pass 0; store 0; pull 1; pull 2; pull 1; pull 2; swap 0; pull 1; swap 1
        """,
    "no epoch fence": """S5
        learn; put 0 a; del 0 a; put 0 b; fetch 1 4; fetch 2 4; fetch 1
        pass 0 2 keep; elect 1; learn 1; learn 2; fetch 2 2     # 0 does not know
        late; decide 1; learn 1
        pass 1 3; pull 2; pull 2; swap 1
        ask 2; hear_zombie 2; answer 2; store 2; lose 2         # and gives 2 what it holds
        elect 2; learn 1; learn 2; fetch 1 2; swap 2; pull 1; pull 1; swap 2; pull 1; swap 1
        """,
    "held kept (C15a)": """S2 away
        restart 2; learn; pass 0 3; pull 2      # 2 holds more than it has
        crash 0; crash 1; elect_unclean 2; learn; store 2; swap 2
        """,
    "no base generation (C15b)": """L2
        crash 1; fence 1; crash 2; crash 0; restart 1; elect_unclean 1; learn 1
        del 1 a; pass 1 2; part 1 4; elect 1    # the others have what it never had
        """,
    "elected again, cleanly (C15c)": """L2
        crash 2; crash 0; fence 0; crash 1; fence 2; restart 2; restart 0
        elect_unclean 0; learn 0; store 0; crash 0  # on the way to its base
        elect_unclean 2; elect 2                # before it noticed that it was unclean
        """,
    "old checkpoint kept (C15d)": """S1
        learn; put 0 a; del 0 a; crash 0; crash 1; fence 0; restart 0; crash 2
        elect_unclean 0; learn 0; store 0
        pass 0 3; part 0 3                      # maps only what is above the base
        """,
    "b going down (C15e)": """L2
        learn; put 0 a; fetch 2; del 0 a; fetch 2; crash 2
        crash 0; fence 0; restart 0; crash 1; elect_unclean 0; learn 0; store 0
        pass 0 4; part 0 4; elect 0; swap 0; learn 0; store 0
        compute 0 1                             # less than the base covers
        """,
    "clean first (C5)": """BODY
        crash 2; fence 2; learn; del 0 a; fetch 1 2
        compute 0 2 keep; end_pass 0; ask 1; store 0; heard 1; answer 1
        compute 0 4 keep; end_pass 0            # g1 is not published yet
        store 1; ask 1; heard 1
        """,
    "checkpoint of held (C5)": """S1
        crash 2; fence 2; learn; put 0 a; fetch 1; del 0 a; fetch 1 2
        pass 0 2 keep; pass 0 2                 # from where the first ends, which is only held
        pull 1; ask 1; heard 1; answer 1; swap 1
        """,
    "difference (C8)": """S3
        learn; put 0 a; fetch 1; fetch 2; del 0 a; fetch 1 2; fetch 2 2
        pass 0 5; late; decide 0; learn 0; swap 0   # 1 and 2 do not hold it
        compute 0 3; end_pass 0; ask 1; store 0; heard 1; answer 1; store 1
        part 1 3; swap 0; swap 1; ask 1; heard 1; decide 0
        """,
    "ordered (C9)": """L2
        learn; del 0 a; fetch 2 2; elect 1; fetch 1 2; learn 1
        compute 1 3 keep; end_pass 1            # a later epoch's, which nobody else hears of
        elect 0; learn 0; elect 1; compute 0 1; end_pass 0
        """,
    "held only (C16)": """S1 away
        pass 0 3; pull 1; pull 1; swap 0; restart 2; learn
        fetch 2 4; pull 2; pull 2; decide 0     # over the tombstone; now it holds what went over it
        """,
    "complete once published (C16)": """S1 away
        pass 0 3; pull 1; pull 1; part 0 3      # in place, and not marked as applied
        restart 2; learn; fetch 2 4; pull 2; pull 2; decide 0
        """,
    "complete of an earlier epoch (C16)": """S1 away
        pass 0 3; pull 1; ask 1; heard 1; swap 0; restart 2; learn; fetch 2 3
        elect 1; learn; fetch 2; pull 2         # 1 has not published it, and 0 had
        fetch 0; pull 0; pull 2; decide 1; learn
        """,
    "complete below the end (C16)": """S1
        learn; put 0 b; fetch 1 2; crash 2; fence 2; learn
        put 0 a; del 0 a; put 0 b; fetch 1 4
        restart 2; learn; fetch 2 2             # b and a
        pass 0 4; pull 2; pull 1; pull 1; swap 0; fetch 2 3; pull 2; decide 0
        """,
    "complete without what was applied (C16)": """S1 away
        pass 0 3; pull 1; pull 1; swap 0; restart 2; learn; fetch 2 3   # over the tombstone
        put 0 b; fetch 1 2; fetch 2 2
        pass 0 4; pull 2; pull 1; pull 1; swap 0; pull 2; decide 0
        """,
    "cut unasked (C17)": """S2 away
        restart 2; learn; pass 0 3; fetch 2 4; pull 2; pull 1; pull 1
        pull 2; decay 2 2                       # 2 is complete: it is proposed, and does not know
        swap 2; decide 0
        """,
    "members cut (C17)": """S2 away
        restart 2; learn; pass 0 3; fetch 2 4; pull 2; pull 1; pull 1
        pull 2; decay 2 2; swap 2; pull 2       # it says so while its entry is in flight
        decide 0
        """,
    "lacking enters (C17)": """S2 away
        restart 2; learn; pass 0 3; fetch 2 4; pull 2; pull 1; pull 1
        put 0 b; fetch 2 2; late                # 0 asks to drop 1, so it cannot propose 2 yet
        pull 2; decay 2 2; swap 2; pull 2       # 2 is cut, and does not fetch at once
        decide 0; learn 0; decide 0
        """,
    "admits while it is lost": """S5
        learn; put 0 a; fetch 1 2; fetch 2 2; crash 2; fence 2; learn
        put 0 a; put 0 b; late; decide 0; learn # 1 is asked no more: 0 is alone
        fetch 1; pass 0 3; fetch 1 2; pull 1; pull 1; swap 1
        put 0 b; pull 1                         # 1 has applied it, and is not level
        rot 0                                   # 0 cannot apply what it has published
        fetch 1 2; decide 0; learn
        store 0; fetch 1; pull 1; pull 1; swap 1
        """,
    "a base of the same name": """S3
        learn; put 0 a; fetch 1 2; fetch 2 2; crash 2; fence 2; learn
        put 0 a; put 0 b; late; decide 0; learn; fetch 1
        pass 0 3; fetch 1 2; pull 1; pull 1; swap 1     # 1 has applied the first
        rot 0; store 0; put 0 a; pass 0 4; swap 0       # and 0 makes another that is called so
        fetch 1 2; pull 1; decide 0; learn
        """,
    "another life's acknowledgement": """S1
        learn; put 0 a; del 0 a; put 0 b; fetch 1 4; fetch 2 4; fetch 0
        pass 0 3; pull 1; pull 2; pull 1; pull 2; swap 2; pull 2    # 0 takes its time
        crash 2; fence 2; wipe 2; restart 2; learn
        fetch 2; swap 0; fetch 2 3; decide 0; learn
        """,
}
"""What breaks without a rule, ``away`` where it begins as AWAY does, and what happens."""


def script_of(name: str) -> tuple[str, str]:
    """What breaks without the rule, and the script."""
    head, _, script = SCRIPTS[name].partition("\n")
    breaks, *away = head.split()
    return breaks, AWAY + script if away else script


def test_every_counterexample_of_the_model_has_a_scenario() -> None:
    known = {name for name in PLANTED if "(C" in name}
    assert known <= SCRIPTS.keys()
    letters = {name.rpartition("(")[2].rstrip(")") for name in known}
    wanted = {*(f"C{i}" for i in range(1, 15)), *(f"C15{x}" for x in "abcde"), "C16", "C17"}
    assert letters == wanted


@pytest.mark.parametrize("name", SCRIPTS)
def test_with_the_rule(name: str) -> None:
    world = World(unclean=PLANTED[name].unclean)
    run(world, script_of(name)[1])
    check_liveness(world)
    for node in world.replicas:
        check_liveness(world, (node,))


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_the_rule(name: str) -> None:
    breaks, script = script_of(name)
    planted: Planted = PLANTED[name]
    with pytest.raises(Violation, match=f"^{breaks}"):
        options = planted.options()
        del options["tearing"], options["decaying"], options["policies"]
        world = World(**options)
        run(world, script)
        if not breaks.startswith("S"):
            check_liveness(world)


ALL_DIED = """
    crash 1; crash 0; restart 0; elect 0; fence 1; fence 2; learn; restart 1; learn
    fetch 1 2
    """


def test_who_had_everything_enters_before_it_has_applied_what_it_holds() -> None:
    """All nodes die between publication and its build; two come back (rule 15)."""
    world = World()
    run(world, AWAY + "pass 0 3; pull 1; pull 1" + ALL_DIED + "pull 1; decide 0")
    first, second = world.machines[:2]
    assert world.image.isr == (0, 1)
    assert second.disk.held is first.disk.held is not None
    assert first.disk.applied is second.disk.applied is None
    check_liveness(world)


def test_it_goes_on_if_there_was_another_pass_before_it_had_applied_the_first() -> None:
    world = World()
    run(world, AWAY + "pass 0 2 keep; pull 1; pull 1; swap 0; pass 0 3; pull 1; pull 1" + ALL_DIED)
    second = world.machines[1]
    assert second.disk.applied is None and second.disk.held is world.machines[0].disk.held
    run(world, "pull 1; decide 0")
    assert world.image.isr == (0, 1)
    check_liveness(world)


def test_who_took_it_after_a_leader_had_published_it_enters_when_it_has_applied_it() -> None:
    world = World()
    run(world, AWAY + "pass 0 3; pull 1; pull 1; restart 2; learn; fetch 2 4; pull 2")
    assert world.machines[2].disk.held is world.machines[0].disk.held
    run(world, "fetch 2; pull 2; decide 0")
    assert 2 not in world.image.isr
    run(world, "swap 2; pull 2; decide 0")
    assert 2 in world.image.isr
