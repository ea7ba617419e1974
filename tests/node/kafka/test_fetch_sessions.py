"""The cache of fetch sessions: slots, eviction, ids, epochs."""

from __future__ import annotations

import gc
import itertools

import pytest

from kept.node.kafka import fetch_sessions as fs
from kept.node.kafka.codec.fetch import FetchRequest, PartitionData
from kept.replication.fetch_messages import FetchPartition


def request(session_id=0, epoch=0, topics=(), forgotten=()):
    return FetchRequest(-1, 0, 1, 1, 0, session_id, epoch, list(topics), list(forgotten), b"")


def cache(slots=2):
    return fs.FetchSessions(itertools.count(1).__next__, slots)


def test_a_full_cache_gives_no_session_until_one_is_old():
    sessions = cache()
    assert [sessions.open(request(), False, 0)[1].id for _ in range(2)] == [1, 2]
    assert sessions.open(request(), False, fs.EVICTION_MS) == (0, None)
    error, made = sessions.open(request(), False, fs.EVICTION_MS + 1)
    assert (error, made.id, len(sessions)) == (0, 3, 2)
    assert sessions.open(request(1, 1), False, 0)[0] == 70


def test_use_keeps_a_session():
    sessions = cache()
    for _ in range(2):
        sessions.open(request(), False, 0)
    assert sessions.open(request(1, 1), False, 1000)[1].epoch == 2
    sessions.open(request(), False, fs.EVICTION_MS + 1)
    assert sessions.open(request(2, 1), False, 0)[0] == 70
    assert sessions.open(request(1, 2), False, 0)[0] == 0


def test_the_epoch_wraps_to_1():
    sessions = cache()
    session = sessions.open(request(), False, 0)[1]
    session.epoch = fs.MAX_EPOCH
    assert sessions.open(request(session.id, fs.MAX_EPOCH), False, 0)[0] == 0
    assert session.epoch == 1


def test_changes_and_forgotten_partitions():
    sessions = cache()
    first = request(topics=[(b"a", [FetchPartition(0, 5, 1), FetchPartition(1, 6, 1)])])
    session = sessions.open(first, False, 0)[1]
    change = request(
        session.id, 1, topics=[(b"a", [FetchPartition(1, 9, 1)])], forgotten=[(b"a", [0, 7])]
    )
    sessions.open(change, False, 0)
    left = {key: cached.request.fetch_offset for key, cached in session.partitions.items()}
    assert left == {(b"a", 1): 9}


def test_news():
    session = cache().open(request(topics=[(b"a", [FetchPartition(0, 0, 1)])]), False, 0)[1]
    cached = session.partitions[b"a", 0]
    assert cached.must_respond(PartitionData(0, 0, 5, 5, 0))
    assert not cached.must_respond(PartitionData(0, 0, 5, 5, 0))
    assert cached.must_respond(PartitionData(0, 0, 6, 5, 0))
    assert cached.must_respond(PartitionData(0, 0, 6, 5, 0, None, b"x"))
    assert cached.must_respond(PartitionData(0, 3))
    assert cached.must_respond(PartitionData(0, 3))
    assert cached.must_respond(PartitionData(0, 0, 6, 5, 0))


def test_a_follower_hears_that_its_log_agrees_though_nothing_else_is_new():
    """It cut its log where the leader said, which may have moved no offset at all: until an answer
    says so, it does not know that the logs agree, and does not join the ISR.
    """
    session = cache().open(request(topics=[(b"a", [FetchPartition(0, 0, 1)])]), False, 0)[1]
    cached = session.partitions[b"a", 0]
    assert cached.must_respond(PartitionData(0, 0, 5, 5, 0, diverging=(0, 5)))
    assert cached.must_respond(PartitionData(0, 0, 5, 5, 0))
    assert not cached.must_respond(PartitionData(0, 0, 5, 5, 0))


class Replica:
    """What a session tells the partition that it was read from."""

    def __init__(self):
        self.left = []

    def follower_stopped(self, replica_id):
        self.left.append(replica_id)

    def remove_waiter(self, waiter):
        pass


def test_a_follower_that_forgets_a_partition_follows_no_more():
    for replica_id, told in ((-1, []), (7, [7])):
        opening = request(topics=[(b"a", [FetchPartition(0, 0, 1)])])._replace(
            replica_id=replica_id
        )
        session = cache().open(opening, False, 0)[1]
        partition = Replica()
        session.partitions[b"a", 0].read_from(partition)
        session.update(request(session.id, 1, forgotten=[(b"a", [0, 1])]))
        assert partition.left == told


def named(count, first=0, replica=-1, **more):
    wanted = [FetchPartition(n, 0, 1) for n in range(first, first + count)]
    return request(topics=[(b"unknown", wanted)], **more)._replace(replica_id=replica)


def small_cache(slots=100, partitions=1000):
    return fs.FetchSessions(itertools.count(1).__next__, slots, partitions)


def test_the_partitions_of_all_sessions_are_limited():
    sessions = small_cache()
    ids = [sessions.open(named(100), False, 0)[1].id for _ in range(10)]
    assert sessions.held_partitions == 1000
    assert sessions.open(named(100), False, 0) == (0, None), "sessionless, which is no error"
    assert sessions.open(request(ids[0], fs.FINAL_EPOCH), False, 0) == (0, None)
    assert sessions.held_partitions == 900
    assert sessions.open(named(100), False, 0)[1] is not None
    assert sessions.open(named(1000), False, 0) == (0, None)
    assert sessions.open(named(1000), False, fs.EVICTION_MS + 1)[1] is not None, "idle ones go"
    assert (len(sessions), sessions.held_partitions) == (1, 1000)


def test_a_large_session_gives_way_to_smaller_ones():
    sessions = small_cache()
    large = sessions.open(named(900), False, 0)[1]
    small = [sessions.open(named(90), False, 0)[1] for _ in range(11)]
    assert None not in small and large.closed
    assert sessions.held_partitions == 990
    assert sessions.open(request(large.id, 1), False, 0)[0] == 70


def test_followers_give_way_to_nobody_and_consumers_to_them():
    sessions = small_cache()
    follower = sessions.open(named(600, replica=2), False, 0)[1]
    consumer = sessions.open(named(400), False, 0)[1]
    assert sessions.open(named(500), False, 0) == (0, None)
    other = sessions.open(named(400, replica=3), False, 0)[1]
    assert consumer.closed and not follower.closed and other is not None
    assert sessions.open(named(10), False, 0) == (0, None)
    full = small_cache(slots=1)
    full.open(named(1), False, 0)
    assert full.open(named(1, replica=2), False, 0)[1] is not None


def test_a_follower_takes_the_slot_of_a_consumer_and_of_no_follower():
    sessions = small_cache(slots=2)
    follower = sessions.open(named(1, replica=2), False, 0)[1]
    consumer = sessions.open(named(1), False, 0)[1]
    assert sessions.open(named(1, replica=3), False, 0)[1] is not None
    assert consumer.closed and not follower.closed
    assert sessions.open(named(1, replica=4), False, 0) == (0, None)
    assert not follower.closed


def test_a_session_that_outgrows_the_cache_is_closed():
    sessions = small_cache()
    grows, other = (sessions.open(named(400), False, 0)[1] for _ in range(2))
    assert sessions.open(named(300, 1000, session_id=grows.id, epoch=1), False, 0)[0] == 70
    assert grows.closed and not other.closed
    assert (len(sessions), sessions.held_partitions) == (1, 400)


@pytest.mark.parametrize("way", ["its reader", "another reader", "sessionless"])
def test_a_session_that_is_closed_is_freed_without_a_collection_of_garbage(way, request):
    """A large one has outlived the collections that are frequent: sixty of 900 KB held 0.5 GB."""
    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    sessions = small_cache(partitions=25)
    if way == "sessionless":
        fs.Session(fs.SESSIONLESS, named(20), False, 0).close()
    else:
        opened = sessions.open(named(20), False, 0)[1].id
        last = named(0)._replace(session_id=opened, session_epoch=fs.FINAL_EPOCH)
        again = named(10) if way == "another reader" else last
        sessions.open(again, False, 0)
    left = [one for one in gc.get_objects() if type(one) is fs.CachedPartition]
    assert len(left) == (10 if way == "another reader" else 0)


def test_no_slots_are_no_sessions():
    assert small_cache(slots=0).open(named(1), False, 0) == (0, None)


def test_a_sessionless_fetch_is_counted_while_it_is_parked():
    sessions = small_cache()
    session = fs.Session(fs.SESSIONLESS, named(600), False, 0)
    assert sessions.park(session) and sessions.held_partitions == 600 + fs.PARKED_PARTITIONS
    assert not sessions.park(fs.Session(fs.SESSIONLESS, named(500), False, 0))
    sessions.unpark(session)
    assert sessions.held_partitions == 0


@pytest.mark.parametrize("replica", [-1, 1])
def test_fetches_of_sessions_are_counted_while_they_are_parked_and_followers_always_are(replica):
    sessions = small_cache()
    session = fs.Session(7, named(1, replica=replica), False, 0)
    most = sessions._max_partitions // fs.PARKED_PARTITIONS
    assert all(sessions.park(session) for _ in range(most))
    assert sessions.park(session) is (replica >= 0)
    for _ in range(most + (replica >= 0)):
        sessions.unpark(session)
    assert sessions.held_partitions == 0


def test_a_session_belongs_to_the_principal_that_opened_it():
    sessions = cache()
    _, ada = sessions.open(request(), False, 0, "User:ada")
    for stranger in ("User:eve", "User:ANONYMOUS", ""):
        assert sessions.open(request(ada.id, 1), False, 0, stranger) == (70, None)
        sessions.open(request(ada.id, fs.FINAL_EPOCH), False, 0, stranger)
    assert sessions.open(request(ada.id, 1), False, 0, "User:ada") == (0, ada)


def test_after_a_change_of_access_a_consumers_session_reads_all_of_it_once():
    sessions = cache()
    topics = [(b"t", [FetchPartition(0, 0, 1), FetchPartition(1, 0, 1)])]
    _, session = sessions.open(request(topics=topics), False, 0)
    session.due.clear()
    sessions.access_changed()
    assert session.recheck
    session.recheck_all()
    assert set(session.due) == {(b"t", 0), (b"t", 1)}
    assert not session.recheck, "once"


class Watched:
    """A replica here: who waits for its end, and for its commits; and what it hears of followers.

    A follower's waiters for the end are in ``ends``, all others in ``moves``.
    """

    def __init__(self):
        self.ends, self.moves, self.polled = [], [], []

    def add_waiter(self, waiter, replica=False):
        (self.ends if replica else self.moves).append(waiter)

    def remove_waiter(self, waiter):
        for waiters in (self.ends, self.moves):
            if waiter in waiters:
                waiters.remove(waiter)

    def follower_polled(self, replica_id, at_ms):
        self.polled.append((replica_id, at_ms))

    def follower_stopped(self, replica_id):
        self.polled.append((replica_id, None))


def reading(replica=-1, now_ms=5):
    """A session of one partition, which has been read to its end: session, partition, replica."""
    session = cache().open(named(1, replica=replica), False, now_ms)[1]
    (cached,) = session.partitions.values()
    replica_here = Watched()
    cached.read_from(replica_here)
    cached.at_end = True
    return session, cached, replica_here


QUIET = PartitionData(0, 0, 5, 5, 0)


@pytest.mark.parametrize(
    "changed", ["error_code", "high_watermark", "last_stable_offset", "log_start_offset"]
)
def test_whatever_moves_is_news_once(changed):
    _, cached, _ = reading()
    assert cached.must_respond(QUIET) and not cached.must_respond(QUIET)
    assert not cached.must_respond(QUIET._replace(partition=9, aborted=[(1, 2)]))
    moved = QUIET._replace(**{changed: 7})
    assert cached.must_respond(moved)
    assert cached.must_respond(moved) == (changed == "error_code"), "an error is told each time"


@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_to_read_from_instead_is_news(replica):
    _, cached, _ = reading()
    cached.must_respond(QUIET)
    assert cached.must_respond(QUIET._replace(preferred_replica=replica))
    assert not cached.must_respond(QUIET)


def test_what_is_read_to_its_end_rests_until_its_replica_moves():
    session, cached, replica = reading()
    heard = []
    session.wake_fetch = lambda: heard.append(True)
    session.responded(cached, QUIET)
    assert not session.due and replica.moves == [cached.mark_due_and_wake] and not replica.ends
    cached.at_end = True
    replica.moves[0]()
    assert list(session.due.values()) == [cached] and heard == [True]
    assert not replica.moves and not replica.polled, "one reading for each move; no follower's"
    session.responded(cached, QUIET)
    assert session.due, "it moved while it was read: it does not rest"


def test_what_has_records_goes_to_the_end_of_the_turn_and_does_not_rest():
    session = cache().open(named(3), False, 0)[1]
    first, second, third = session.partitions.values()
    first.at_end = True
    session.responded(first, QUIET._replace(records=b"x"))
    assert list(session.due.values()) == [second, third, first]
    session.responded(second, QUIET)
    assert list(session.due.values()) == [second, third, first], "there is more to read"


def test_an_answer_about_what_was_forgotten_meanwhile_changes_nothing():
    session, cached, replica = reading()
    session.update(request(session.id, 1, forgotten=[(b"unknown", [0])]))
    session.responded(cached, QUIET)
    session.responded(cached, QUIET._replace(records=b"x"))
    assert not session.due and not replica.moves


@pytest.mark.parametrize("follower", [0, 3])
@pytest.mark.parametrize("awaits_commits", [False, True])
def test_a_follower_waits_for_the_end_and_hears_of_commits_later(follower, awaits_commits):
    """At once where consumers read from it."""
    session, cached, replica = reading(follower, now_ms=77)
    heard = []
    session.awaits_commits, session.wake_fetch = awaits_commits, lambda: heard.append(True)
    session.responded(cached, QUIET)
    assert replica.ends == [cached.mark_due_and_wake]
    assert replica.moves == [cached.mark_due_and_wake if awaits_commits else cached.mark_due]
    cached.at_end = True
    replica.moves[0]()
    assert list(session.due.values()) == [cached] and not cached.at_end
    assert heard == [True] * awaits_commits and not replica.moves
    assert replica.ends == ([] if awaits_commits else [cached.mark_due_and_wake]), (
        "the end is watched on"
    )
    assert replica.polled == [(follower, 77)] * awaits_commits
    if not awaits_commits:
        replica.ends[0]()
        assert heard == [True] and replica.polled == [(follower, 77)] and not replica.ends


def test_a_follower_of_any_number_that_forgets_a_partition_follows_no_more():
    session, _, replica = reading(replica=0)
    session.update(request(session.id, 1, forgotten=[(b"unknown", [0])]))
    assert replica.polled == [(0, None)]


def test_a_session_that_is_parked_watches_what_is_due_and_a_closed_one_nothing():
    session, cached, replica = reading()
    session.watch()
    assert replica.moves == [cached.mark_due_and_wake]
    session.wake_fetch = print
    session.close()
    assert not replica.moves and session.wake_fetch is None
    session.watch()
    assert not replica.moves
    unread = cache().open(named(1), False, 0)[1]
    unread.watch()  # of which nobody knows a replica yet


def test_another_replica_under_the_same_name_is_watched_instead():
    session, cached, replica = reading()
    session.watch()
    cached.read_from(replica)
    assert replica.moves == [cached.mark_due_and_wake], "it is the same"
    other = Watched()
    cached.read_from(other)
    assert not replica.moves
    session.watch()
    assert other.moves == [cached.mark_due_and_wake] and not replica.moves


@pytest.mark.parametrize(("epoch", "told"), [(4, False), (5, True)])
def test_a_new_leader_epoch_is_told_that_the_logs_agree(epoch, told):
    """Nothing else is told again because a request names the partition."""
    known = FetchPartition(0, 0, 1, 4)
    session = cache().open(request(topics=[(b"a", [known])]), False, 0)[1]
    cached = session.partitions[b"a", 0]
    cached.must_respond(QUIET)
    session.due.clear()
    wanted = known._replace(current_leader_epoch=epoch, fetch_offset=3)
    session.update(request(session.id, 1, topics=[(b"a", [wanted])]))
    assert session.due == {(b"a", 0): cached} and cached.request == wanted
    assert cached.must_respond(QUIET) == told


def test_only_consumers_read_all_again_after_a_change_of_access():
    sessions = cache(3)
    consumer, *followers = (
        sessions.open(named(2, replica=replica), False, 0)[1] for replica in (-1, 0, 7)
    )
    assert sessions.of_followers() == followers
    sessions.access_changed()
    assert [session.recheck for session in (consumer, *followers)] == [True, False, False]
    first, second = consumer.partitions.values()
    consumer.due = {second.key: second}
    consumer.recheck_all()
    assert list(consumer.due.values()) == [second, first], "what was due keeps its turn"


def test_what_does_not_continue_a_session_is_refused_and_changes_nothing():
    sessions = cache()
    session = sessions.open(named(1), False, 0)[1]
    for uses_ids, epoch, code in ((True, 1, 106), (False, 0x7FFF, 71), (False, 2, 71)):
        asked = named(3, first=5, session_id=session.id, epoch=epoch)
        assert sessions.open(asked, uses_ids, 9) == (code, None)
        assert (session.epoch, session.last_used_ms, len(session.partitions)) == (1, 0, 1)
    follower = named(1, session_id=session.id, epoch=1, replica=4)
    assert sessions.open(follower, False, 9) == (70, None)
    assert sessions.open(named(0, session_id=session.id, epoch=1), False, 9)[1] is session
    assert (session.epoch, session.last_used_ms) == (2, 9)


def test_a_session_grows_up_to_the_last_free_partition_and_shrinks():
    sessions = small_cache(partitions=10)
    session = sessions.open(named(6), False, 0)[1]
    grown = named(4, first=6, session_id=session.id, epoch=1)
    assert sessions.open(grown, False, 0) == (0, session) and sessions.held_partitions == 10
    less = request(session.id, 2, forgotten=[(b"unknown", list(range(7)))])
    assert sessions.open(less, False, 0) == (0, session) and sessions.held_partitions == 3
    assert sessions.open(named(7), False, 0)[1] is not None, "all of them"


def test_another_that_is_old_gives_way_to_a_session_that_grows_and_not_a_moment_before():
    for idle_ms, code in ((fs.EVICTION_MS, 70), (fs.EVICTION_MS + 1, 0)):
        sessions = small_cache(partitions=10)
        other = sessions.open(named(5), False, 0)[1]
        session = sessions.open(named(5), False, idle_ms)[1]
        grown = named(1, first=6, session_id=session.id, epoch=1)
        assert sessions.open(grown, False, idle_ms)[0] == code
        assert (other.closed, session.closed) == ((True, False) if code == 0 else (False, True))


def test_the_largest_gives_way_only_to_a_smaller_one():
    for size, gives_way in ((5, False), (4, True)):
        sessions = small_cache(partitions=10)
        large, small = (sessions.open(named(count), False, 0)[1] for count in (5, 4))
        assert (sessions.open(named(size), False, 0)[1] is not None) == gives_way
        assert (large.closed, small.closed) == (gives_way, False)


def test_a_fetch_waits_up_to_the_last_free_partition():
    sessions = small_cache(partitions=2 * fs.PARKED_PARTITIONS + 1)
    session = sessions.open(named(1), False, 0)[1]
    assert [sessions.park(session) for _ in range(3)] == [True, True, False]


def test_ids_are_positive_and_nobody_elses():
    sessions = fs.FetchSessions(iter([0, -5, 1, 1, 0, 2]).__next__)
    assert [sessions.open(named(1), False, 0)[1].id for _ in range(2)] == [1, 2]


def test_a_session_of_another_cache_is_not_closed():
    sessions, others = cache(), cache()
    session, other = sessions.open(named(1), False, 0)[1], others.open(named(1), False, 0)[1]
    sessions.close(other)
    assert not session.closed and not other.closed and sessions.held_partitions == 1
    sessions.close(session)
    assert session.closed and not len(sessions) and sessions.held_partitions == 0
    sessions.close(session)
    assert sessions.held_partitions == 0


class Clock:
    """A loop whose time passes when told to, and the timers that were made."""

    def __init__(self):
        self.now = 0.0
        self.made = []

    def call_at(self, when, callback, *args):
        self.made.append(Timer(when, callback, args))
        return self.made[-1]

    def advance(self, now):
        self.now = now
        while due := [t for t in self.made if not t.done and t.when <= now]:
            for timer in due:
                timer.done = True
                timer.callback(*timer.args)

    @property
    def armed(self):
        return [timer.when for timer in self.made if not timer.done]


class Timer:
    def __init__(self, when, callback, args):
        self.when, self.callback, self.args, self.done = when, callback, args, False

    def cancel(self):
        self.done = True


class Parked:
    """A request that waits, and ends its wait as a fetch does."""

    def __init__(self, session, clock, until):
        self.session, self.clock, self.ended_at = session, clock, None
        session.wait_until(until, clock, self.time_up)

    def time_up(self):
        self.answer()
        self.ended_at = self.clock.now

    def answer(self):
        self.session.wait_ended(self.time_up)


def test_requests_answered_before_their_time_share_a_timer_and_the_last_has_its_own_time():
    clock, session = Clock(), fs.Session(7, named(1), False, 0)
    for number in range(100):
        clock.advance(number / 1000)
        Parked(session, clock, number / 1000 + 0.5).answer()
    last = Parked(session, clock, 0.6)
    assert len(clock.made) == 1
    clock.advance(0.59)
    assert last.ended_at is None and clock.armed == [0.6]
    clock.advance(0.6)
    assert last.ended_at == 0.6 and not clock.armed


def test_a_request_that_waits_for_less_than_the_one_before_is_not_answered_late():
    clock, session = Clock(), fs.Session(7, named(1), False, 0)
    Parked(session, clock, 30.0).answer()
    short = Parked(session, clock, 0.5)
    clock.advance(0.5)
    assert short.ended_at == 0.5 and not clock.armed


def test_the_next_request_of_a_session_ends_the_wait_of_the_one_before():
    clock, session = Clock(), fs.Session(7, named(1), False, 0)
    first = Parked(session, clock, 0.5)
    clock.advance(0.1)
    second = Parked(session, clock, 0.6)
    assert (first.ended_at, second.ended_at) == (0.1, None)
    clock.advance(0.6)
    assert second.ended_at == 0.6


@pytest.mark.parametrize("parked", [True, False])
def test_a_session_that_is_closed_lets_what_is_parked_wait_and_has_no_timer_else(parked):
    clock, session = Clock(), fs.Session(7, named(1), False, 0)
    request = Parked(session, clock, 0.5)
    if not parked:
        request.answer()
    session.close()
    assert clock.armed == ([0.5] if parked else [])
    clock.advance(0.5)
    assert request.ended_at == (0.5 if parked else None)


def test_a_wait_that_was_replaced_does_not_end_the_one_after_it():
    clock, session = Clock(), fs.Session(7, named(1), False, 0)
    first, second = Parked(session, clock, 0.5), Parked(session, clock, 0.6)
    session.close()
    first.answer()
    assert clock.armed == [0.5], "of the second one, which moves it"
    second.answer()
    assert not clock.armed
