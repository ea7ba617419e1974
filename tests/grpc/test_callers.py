"""Whose place a connection or a call of gRPC takes when all are taken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kept.cluster.security.acls import ANONYMOUS
from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.node.grpc import callers
from kept.node.grpc.callers import Call, Caller, Callers, Evicted
from kept.node.security.session import Session
from tests.support.given import Given
from tests.support.loops import run

ADA = Session("User:ada")


class House:
    """Places for so many connections, and for so many calls."""

    def __init__(self, connections: int, calls: int = 4, *, secured: bool = True) -> None:
        self.closed: list[str] = []
        live: Any = Given(
            current__authorizer_class_name=STANDARD_AUTHORIZER if secured else "",
            current__listeners=(),
            current__grpc_max_connections=connections,
            current__grpc_max_requests=calls,
        )
        self.callers = Callers(live)

    def enter(self, name: str, principal: str = ANONYMOUS, host: str = "") -> Caller | None:
        """A client connects."""
        connection: Any = Given(
            session=Session(principal, host), transport__abort=lambda: self.closed.append(name)
        )
        return self.callers.enter(connection)

    def stay(self, name: str, principal: str = ANONYMOUS, host: str = "") -> Caller:
        """A client connects, and there is a place."""
        caller = self.enter(name, principal, host)
        assert caller is not None
        return caller


def test_idle_strangers_leave_the_oldest_first() -> None:
    house = House(3)
    for name in "abcde":
        assert house.enter(name)
    assert house.closed == ["a", "b"]


def test_strangers_take_no_place_of_who_has_logged_in() -> None:
    house = House(4)
    house.stay("certificate", "User:ada")
    by_metadata = house.stay("metadata")
    call = house.callers.begin(by_metadata)
    assert call is not None
    house.callers.logged_in(call, ADA)
    house.callers.end(call)
    for number in range(100):
        house.stay(f"stranger-{number}")
    assert house.closed == [f"stranger-{number}" for number in range(98)]


def test_a_stranger_with_a_call_goes_after_one_without() -> None:
    house = House(2)
    house.callers.begin(house.stay("with"))
    house.stay("without")
    for name in "ab":
        house.stay(name)
    assert house.closed == ["without", "a"]
    house = House(2)
    for name in "ab":
        house.callers.begin(house.stay(name))
    house.stay("c")
    assert house.closed == ["a"]


def test_a_quarter_is_for_those_who_have_yet_to_log_in() -> None:
    """Else who comes would have to log in before the next one does."""
    house = House(8, calls=9)
    known = [house.stay(f"known-{number}", "User:ada") for number in range(8)]
    for busy in known[:6]:
        house.callers.begin(busy)
    house.stay("a")
    house.stay("b")
    assert house.closed == ["known-6", "known-7"]
    house.stay("c")
    assert house.closed[2:] == ["a"]


def test_beyond_their_quarter_strangers_take_nothing_of_who_has_logged_in_and_is_idle() -> None:
    house = House(8, calls=9)
    known = [house.stay(f"known-{number}", "User:ada") for number in range(8)]
    for busy in known[:5]:
        house.callers.begin(busy)
    house.callers.begin(house.stay("calls"))
    for name in "abc":
        house.stay(name)
    assert house.closed == ["known-5", "known-6", "a", "b"]


def test_whose_call_logs_in_has_logged_in_at_once() -> None:
    house = House(2)
    house.callers.logged_in(begun(house, house.stay("known")), ADA)
    house.callers.begin(house.stay("stranger"))
    house.stay("new")
    assert house.closed == ["stranger"]


def test_a_connection_is_idle_when_the_last_of_its_calls_has_ended() -> None:
    house = House(1)
    caller = house.stay("a", "User:ada")
    first, second = begun(house, caller), begun(house, caller)
    house.callers.end(first)
    assert house.enter("b", "User:bob") is None
    house.callers.end(second)
    assert house.enter("b", "User:bob") is not None and house.closed == ["a"]


def test_who_calls_says_the_call_or_else_its_connection() -> None:
    house = House(1)
    peer = f"unix:/tmp/kept-peers-x/{house.stay('a', 'User:bob').name}"

    def principal() -> str | None:
        session = house.callers.session(peer)
        return None if session is None else session.principal

    assert principal() == "User:bob"
    token = callers.CALLER.set(ADA)
    assert principal() == "User:ada"
    callers.CALLER.reset(token)
    house.stay("b")
    assert house.closed == ["a"] and principal() is None, "whose place is taken calls no more"


def test_who_has_logged_in_and_calls_gives_way_to_nobody() -> None:
    house = House(2)
    for name in "ab":
        house.callers.begin(house.stay(name, "User:ada"))
    assert house.enter("c") is None
    assert not house.closed


def test_where_nobody_logs_in_a_call_keeps_its_connection() -> None:
    house = House(2, secured=False)
    call = house.callers.begin(house.stay("calls"))
    house.stay("idle")
    other = house.stay("new")
    assert house.closed == ["idle"]
    house.callers.begin(other)
    assert house.enter("more") is None
    assert call is not None
    house.callers.end(call)
    house.stay("more")
    assert house.closed == ["idle", "calls"]


def test_where_nobody_logs_in_each_address_has_its_share_of_connections() -> None:
    """A quarter: beyond, the newest connection gives way to that of an address which has less."""
    house = House(8, calls=20, secured=False)

    def busy(name: str, host: str) -> bool:
        caller = house.enter(name, host=host)
        return caller is not None and house.callers.begin(caller) is not None

    assert all(busy(f"most-{number}", "10.0.0.1") for number in range(5))
    assert all(busy(f"many-{number}", "10.0.0.2") for number in range(3))
    assert busy("a", "10.0.0.3") and house.closed == ["most-4"]
    assert busy("b", "10.0.0.3") and house.closed == ["most-4", "most-3"]
    assert not busy("c", "10.0.0.3"), "it has its share"
    assert not busy("d", "10.0.0.1"), "it has more"
    assert busy("e", "10.0.0.4") and len(house.closed) == 3
    assert busy("f", "10.0.0.4") and len(house.closed) == 4
    assert house.closed[:2] + sorted(house.closed[2:]) == ["most-4", "most-3", "many-2", "most-2"]


def test_the_more_addresses_there_are_the_smaller_is_the_share_of_each() -> None:
    """Else four of them would keep everybody else out."""
    house = House(8, calls=20, secured=False)

    def busy(name: str, host: str) -> bool:
        caller = house.enter(name, host=host)
        return caller is not None and house.callers.begin(caller) is not None

    assert all(busy(f"{number}-{again}", f"10.0.0.{number}") for again in "ab" for number in "1234")
    assert busy("5", "10.0.0.5") and len(house.closed) == 1 and house.closed[0].endswith("b")
    assert not busy("6", "10.0.0.5"), "it has its share"
    assert all(busy(str(number), f"10.0.0.{number}") for number in (6, 7, 8))
    assert sorted(house.closed) == ["1-b", "2-b", "3-b", "4-b"]
    assert not busy("9", "10.0.0.9"), "nobody has more than one"


def test_addresses_of_one_network_of_ipv6_have_one_share() -> None:
    house = House(8, calls=20, secured=False)
    for number in range(8):
        house.callers.begin(house.stay(f"many-{number}", host=f"2001:db8::{number}"))
    for number in range(2):
        house.callers.begin(house.stay(f"new-{number}", host="10.0.0.1"))
    assert house.closed == ["many-7", "many-6"]
    assert house.enter("more", host="2001:db8::abcd") is None


def test_an_address_beyond_its_share_takes_nothing_of_that_of_others() -> None:
    """Not even what is idle: else who opens connections by the hundred has it before its call
    begins. Who has less takes what is idle, his own last.
    """
    house = House(8, calls=20, secured=False)
    for number in range(6):
        house.callers.begin(house.stay(f"many-{number}", host="10.0.0.1"))
    few = [house.stay(f"few-{number}", host="10.0.0.2") for number in range(2)]
    assert house.enter("more", host="10.0.0.1") is None
    house.callers.begin(house.stay("new", host="10.0.0.3"))
    assert house.closed == ["many-5"]
    assert house.enter("own", host="10.0.0.2") is not None and house.closed[1:] == ["few-0"]
    house.callers.begin(few[1])
    house.stay("idle", host="10.0.0.4")
    house.stay("second", host="10.0.0.4")
    assert house.closed[2:] == ["many-4", "many-3"]


def test_of_few_places_each_address_may_have_one() -> None:
    house = House(2, secured=False)
    for name in "ab":
        house.callers.begin(house.stay(name, host="10.0.0.1"))
    house.callers.begin(house.stay("c", host="10.0.0.2"))
    assert house.closed == ["b"]
    assert house.enter("d", host="10.0.0.3") is None


def test_idle_connections_of_many_addresses_leave_the_oldest_first() -> None:
    house = House(4, secured=False)
    for number in range(6):
        house.stay(f"c-{number}", host=f"10.0.0.{number}")
    assert house.closed == ["c-0", "c-1"]


def test_silent_connections_of_many_networks_end_no_call_and_keep_nobody_out() -> None:
    """Beyond a quarter of the places they give way to anybody."""
    house = House(8, calls=20, secured=False)
    for number in range(4):
        house.callers.begin(house.stay(f"proxy-{number}", host="10.0.0.1"))
    for number in range(8):
        house.stay(f"silent-{number}", host=f"2001:db8:0:{number}::1")
    assert house.closed == [f"silent-{number}" for number in range(4)]
    for number in range(2):
        house.callers.begin(house.stay(f"more-{number}", host="10.0.0.1"))
    assert house.closed[4:] == ["silent-4", "silent-5"]


def test_in_one_network_of_ipv6_an_address_gives_way_to_a_neighbour_with_fewer() -> None:
    house = House(8, calls=20, secured=False)
    for number in range(8):
        house.callers.begin(house.stay(f"many-{number}", host="2001:db8::1"))
    for number in range(4):
        house.callers.begin(house.stay(f"few-{number}", host="2001:db8::2"))
    assert house.closed == ["many-7", "many-6", "many-5", "many-4"]
    assert house.enter("more", host="2001:db8::2") is None
    assert house.enter("more", host="2001:db8::1") is None


def test_where_somebody_logs_in_addresses_have_no_share() -> None:
    """Who has logged in and calls keeps his place."""
    house, other = House(4, calls=4), House(9, calls=4)
    for number in range(4):
        who = Session(f"User:{number}")
        for its in (house, other):
            call = begun(its, its.stay(f"a-{number}", who.principal, "10.0.0.1"))
            its.callers.logged_in(call, who)
    assert house.enter("b", host="10.0.0.2") is None
    assert other.callers.begin(other.stay("b", host="10.0.0.2")) is None
    assert not house.closed and not other.closed


def test_one_user_keeps_nobody_from_logging_in() -> None:
    """However many connections he has with calls: a quarter of the places is for others."""
    house = House(8, calls=99)
    for number in range(8):
        house.callers.logged_in(begun(house, house.stay(f"ada-{number}")), ADA)
    for name in ("b", "c"):
        house.callers.logged_in(begun(house, house.stay(name)), Session(f"User:{name}"))
    assert house.closed == ["ada-7", "ada-6"]
    for number in range(3):
        house.stay(f"stranger-{number}")
    assert house.closed[2:] == ["ada-5", "stranger-0", "stranger-1"], "strangers go first"


def test_a_connection_that_is_closed_gives_its_place_back_once() -> None:
    house = House(2)
    first = house.stay("first")
    call = house.callers.begin(first)
    assert call is not None
    for _ in range(2):
        house.callers.leave(first)
    house.callers.end(call)  # of a connection that is gone: it counts no more
    for name in "ab":
        house.stay(name)
    assert not house.closed


# Calls.


async def endless() -> None:
    await asyncio.Event().wait()


async def turn() -> None:
    """Let tasks run."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("secured", [False, True])
@run
async def test_a_call_that_waits_for_its_request_gives_way(secured: bool) -> None:
    house = House(9, calls=2, secured=secured)
    caller = house.stay("a")
    served, waiting = (house.callers.begin(caller) for _ in range(2))
    assert served is not None and waiting is not None
    if secured:
        house.callers.logged_in(served, ADA)
    house.callers.serve(served)
    working = [asyncio.ensure_future(call.run(endless())) for call in (served, waiting)]
    await turn()
    new = house.callers.begin(caller)
    assert new is not None
    await turn()
    assert [task.done() for task in working] == [False, True]
    with pytest.raises(Evicted):
        working[1].result()
    house.callers.logged_in(new, ADA)
    house.callers.serve(new)
    assert house.callers.begin(caller) is None
    house.callers.end(new)
    assert house.callers.begin(caller) is not None
    working[0].cancel()


@run
async def test_a_stranger_who_is_served_gives_way_to_a_call_and_before_him_who_waits() -> None:
    house = House(9, calls=2)
    caller = house.stay("a")
    served = house.callers.begin(caller)
    assert served is not None
    house.callers.serve(served)
    work = asyncio.ensure_future(served.run(endless()))
    waiting = house.callers.begin(caller)
    assert waiting is not None
    waits = asyncio.ensure_future(waiting.run(endless()))
    await turn()
    known = house.callers.begin(caller)
    assert known is not None
    house.callers.logged_in(known, ADA)
    await turn()
    assert waits.done() and not work.done()
    assert house.callers.begin(caller) is not None
    await turn()
    assert work.done()
    for task in (work, waits):
        with pytest.raises(Evicted):
            task.result()


@run
async def test_who_was_not_asked_who_he_is_has_not_logged_in() -> None:
    """On a listener without logins, beside an authorizer."""
    house = House(1, calls=1)
    call = begun(house, house.stay("stranger"))
    house.callers.logged_in(call, Session(ANONYMOUS))
    house.callers.serve(call)
    work = asyncio.ensure_future(call.run(endless()))
    await turn()
    new = house.callers.begin(house.stay("new"))
    assert house.closed == ["stranger"] and new is not None
    await turn()
    assert work.done()
    with pytest.raises(Evicted):
        work.result()


async def return_from(house: House, call: Call) -> None:
    """It is served; its response is on its way."""
    house.callers.serve(call)
    await call.run(asyncio.sleep(0))
    house.callers.served(call)


@run
async def test_where_nobody_logs_in_each_address_has_its_share_of_calls() -> None:
    """Also where they come by one connection, and do not end."""
    house = House(9, calls=8, secured=False)
    most, many, few = (house.stay("c", host=f"10.0.0.{number}") for number in (1, 2, 3))
    served: list[tuple[Call, asyncio.Future[None]]] = []

    def serve(caller: Caller) -> bool:
        call = house.callers.begin(caller)
        if call is not None:
            house.callers.serve(call)
            served.append((call, asyncio.ensure_future(call.run(endless()))))
        return call is not None

    assert all(serve(most) for _ in range(5)) and all(serve(many) for _ in range(3))
    await turn()
    assert serve(few) and serve(few)
    assert not serve(few) and not serve(most)
    await turn()
    ended = [number for number, (_, work) in enumerate(served) if work.done()]
    assert ended == [3, 4] and not house.closed
    for number in ended:
        with pytest.raises(Evicted):
            served[number][1].result()
    for _, work in served:
        work.cancel()


@run
async def test_calls_of_many_networks_whose_requests_do_not_come_end_no_other() -> None:
    house = House(20, calls=8, secured=False)
    proxy = house.stay("proxy", host="10.0.0.1")
    served, silent = [], []
    for _ in range(4):
        call = begun(house, proxy)
        house.callers.serve(call)
        served.append(asyncio.ensure_future(call.run(endless())))
    for number in range(6):
        call = begun(house, house.stay("silent", host=f"2001:db8:0:{number}::1"))
        silent.append(asyncio.ensure_future(call.run(endless())))
        await turn()
    assert begun(house, proxy)
    await turn()
    assert not any(work.done() for work in served)
    assert [work.done() for work in silent] == [True, True, True, False, False, False]
    for work in silent[:3]:
        with pytest.raises(Evicted):
            work.result()
    for work in (*served, *silent):
        work.cancel()


@pytest.mark.parametrize("secured", [False, True])
@run
async def test_who_does_not_take_a_response_is_closed_when_his_place_is_needed(
    secured: bool,
) -> None:
    house = House(9, calls=2, secured=secured)
    caller = house.stay("does not read")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callers, "TAKE_S", 0)
        for _ in range(2):
            await return_from(house, begun(house, caller))
        await turn()
    assert not house.closed
    assert house.callers.begin(house.stay("other")) is not None
    assert house.closed == ["does not read"]


@run
async def test_a_response_on_its_way_does_not_end_its_connection() -> None:
    """Its other calls would have an unknown fate, though their client is well."""
    house = House(9, calls=2, secured=False)
    caller = house.stay("a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callers, "TAKE_S", 60)
        for _ in range(2):
            await return_from(house, begun(house, caller))
    assert house.callers.begin(house.stay("b")) is None
    assert not house.closed


@pytest.mark.parametrize("secured", [False, True])
@run
async def test_a_response_that_is_not_taken_does_not_end_another_call_of_its_connection(
    secured: bool,
) -> None:
    house = House(9, calls=2, secured=secured)
    caller = house.stay("a")
    other = begun(house, caller)
    if secured:  # a proxy, which sends calls of many
        house.callers.logged_in(other, ADA)
    house.callers.serve(other)
    work = asyncio.ensure_future(other.run(endless()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callers, "TAKE_S", 0)
        untaken = begun(house, caller)
        await return_from(house, untaken)
        await turn()
    assert house.callers.begin(house.stay("b")) is None
    assert not house.closed and not work.done()
    house.callers.end(untaken)
    assert house.callers.begin(house.stay("b")) is not None
    work.cancel()


@run
async def test_a_call_that_waits_gives_way_before_the_connection_that_does_not_read() -> None:
    """The same connection: its request may still come."""
    house = House(9, calls=2, secured=False)
    caller = house.stay("a", host="10.0.0.1")
    waiting = begun(house, caller)
    work = asyncio.ensure_future(waiting.run(endless()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callers, "TAKE_S", 0)
        await return_from(house, begun(house, caller))
        await turn()
    assert house.callers.begin(house.stay("b", host="10.0.0.2")) is not None
    await turn()
    assert not house.closed and work.done()
    with pytest.raises(Evicted):
        work.result()


@run
async def test_whoever_keeps_responses_on_their_way_gives_way_to_another_address() -> None:
    """One that has just come spares its connection, and with it all that are not taken: an address
    could hold every call so, with one new call a second.
    """
    house = House(9, calls=4, secured=False)
    greedy = house.stay("greedy", host="10.0.0.1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callers, "TAKE_S", 0)
        for _ in range(3):
            await return_from(house, begun(house, greedy))
        await turn()
        patch.setattr(callers, "TAKE_S", 60)
        await return_from(house, begun(house, greedy))
    assert house.callers.begin(house.stay("own", host="10.0.0.1")) is None
    assert not house.closed
    assert house.callers.begin(house.stay("other", host="10.0.0.2")) is not None
    assert house.closed == ["greedy"]


@run
async def test_a_stranger_who_is_served_gives_way_before_a_response_on_its_way() -> None:
    house = House(9, calls=2)
    await return_from(house, begun(house, house.stay("returned")))
    served = begun(house, house.stay("served"))
    house.callers.serve(served)
    work = asyncio.ensure_future(served.run(endless()))
    await turn()
    new = begun(house, house.stay("new"))
    await turn()
    assert work.done() and not house.closed
    house.callers.logged_in(new, ADA)
    assert house.callers.begin(house.stay("newer")) is not None
    assert house.closed == ["returned"]
    with pytest.raises(Evicted):
        work.result()


@run
async def test_a_call_that_ended_before_its_work_did_has_no_place() -> None:
    house = House(9, calls=1, secured=False)
    call = begun(house, house.stay("a"))
    house.callers.end(call)
    await return_from(house, call)
    assert house.callers.begin(house.stay("b")) is not None
    assert not house.closed


# Logins that are being checked.


@run
async def test_a_login_that_is_checked_keeps_its_place_until_it_is_refused() -> None:
    house = House(9, calls=4)
    checks = [begun(house, house.stay("a")) for _ in range(2)]
    working = [asyncio.ensure_future(call.run(endless())) for call in checks]
    await turn()
    for call in checks:
        house.callers.check(call)
    for _ in range(9):  # wrong passwords, whose answer waits
        house.callers.refused(await working_call(house, working))
    await turn()
    assert [task.done() for task in working[:2]] == [False, False]
    assert [task.done() for task in working[2:]] == 7 * [True] + 2 * [False]
    house.callers.refused(checks[0])
    for _ in range(3):
        await working_call(house, working)
    assert [task.done() for task in working[:2]] == [True, False]
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)


@run
async def test_of_logins_that_are_checked_the_newest_give_way_beyond_half_of_the_places() -> None:
    """Else none would come to an end while others come faster than they are checked."""
    house = House(9, calls=4)
    working: list[asyncio.Future[None]] = []
    for _ in range(9):
        house.callers.check(await working_call(house, working))
    await turn()
    assert [task.done() for task in working] == 3 * [False] + 5 * [True] + [False]
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)


@run
async def test_half_of_the_places_are_for_logins_that_are_checked() -> None:
    house = House(9, calls=4)
    working: list[asyncio.Future[None]] = []
    for _ in range(2):
        house.callers.check(await working_call(house, working))
    for _ in range(2):
        known = await working_call(house, working)
        house.callers.logged_in(known, ADA)
        house.callers.serve(known)
    assert house.callers.begin(house.stay("new")) is None
    await turn()
    assert not any(task.done() for task in working)
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)


@run
async def test_one_user_keeps_nobody_from_calling() -> None:
    """His streams do not end: the newest do, while he has more than a quarter of the places."""
    house = House(99, calls=8)
    working: list[asyncio.Future[None]] = []
    for number in range(9):
        call = await working_call(house, working)
        house.callers.logged_in(call, ADA if number < 8 else Session("User:bob"))
        house.callers.serve(call)
    for _ in range(2):
        house.callers.check(await working_call(house, working))
    assert house.callers.begin(house.stay("new")) is None
    await turn()
    assert [number for number, work in enumerate(working) if work.done()] == [5, 6, 7]
    assert not house.closed
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)


@run
async def test_a_users_responses_that_are_not_taken_end_with_no_call_of_another() -> None:
    """They end with their connection only, which a proxy may share."""
    house = House(99, calls=4)
    shared, own = house.stay("shared"), house.stay("own")
    for caller, who in ((shared, Session("User:bob")), (own, ADA), (shared, ADA), (shared, ADA)):
        call = begun(house, caller)
        house.callers.logged_in(call, who)
        house.callers.serve(call)
    assert begun(house, house.stay("stranger"))
    assert house.closed == ["own"]


@run
async def test_where_another_call_gives_way_no_login_that_is_checked_does() -> None:
    """Also where these hold more than half of the places."""
    house = House(9, calls=4)
    working: list[asyncio.Future[None]] = []
    for _ in range(3):
        house.callers.check(await working_call(house, working))
    for _ in range(2):
        await working_call(house, working)
    assert [task.done() for task in working] == [False, False, False, True, False]
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)


def begun(house: House, caller: Caller) -> Call:
    """A call that has a place."""
    call = house.callers.begin(caller)
    assert call is not None
    return call


async def working_call(house: House, working: list[asyncio.Future[None]]) -> Call:
    """A call of a new stranger, whose work is added to ``working``."""
    call = begun(house, house.stay("stranger"))
    working.append(asyncio.ensure_future(call.run(endless())))
    await turn()
    return call


@run
async def test_whose_call_logged_in_keeps_its_place_until_the_response_is_taken() -> None:
    """Before its request has come, and while its response is not read."""
    house = House(9, calls=1)
    call = begun(house, house.stay("a"))
    receiving = asyncio.ensure_future(call.run(endless()))
    await turn()
    house.callers.logged_in(call, ADA)
    assert house.callers.begin(house.stay("b")) is None
    await turn()
    assert not receiving.done()
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callers, "TAKE_S", 0)
        await return_from(house, call)
        await turn()
    assert house.callers.begin(house.stay("c")) is None and not house.closed
    house.callers.end(call)
    assert house.callers.begin(house.stay("d")) is not None


@run
async def test_a_call_that_its_client_cancels_is_not_taken_for_evicted() -> None:
    house = House(9)
    call = house.callers.begin(house.stay("a"))
    assert call is not None
    work = asyncio.ensure_future(call.run(endless()))
    await turn()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
