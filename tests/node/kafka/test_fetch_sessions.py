"""The cache of fetch sessions: slots, eviction, ids, epochs."""

from __future__ import annotations

import itertools

import pytest

from kept.node.kafka import fetch_sessions as fs
from kept.node.kafka.codec.fetch import FetchPartition, FetchRequest, PartitionData


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
    assert cached.has_news(PartitionData(0, 0, 5, 5, 0))
    assert not cached.has_news(PartitionData(0, 0, 5, 5, 0))
    assert cached.has_news(PartitionData(0, 0, 6, 5, 0))
    assert cached.has_news(PartitionData(0, 0, 6, 5, 0, None, b"x"))
    assert cached.has_news(PartitionData(0, 3))
    assert cached.has_news(PartitionData(0, 3))
    assert cached.has_news(PartitionData(0, 0, 6, 5, 0))


def test_a_follower_hears_that_its_log_agrees_though_nothing_else_is_new():
    """It cut its log where the leader said, which may have moved no offset at all: until an answer
    says so, it does not know that the logs agree, and does not join the ISR.
    """
    session = cache().open(request(topics=[(b"a", [FetchPartition(0, 0, 1)])]), False, 0)[1]
    cached = session.partitions[b"a", 0]
    assert cached.has_news(PartitionData(0, 0, 5, 5, 0, diverging=(0, 5)))
    assert cached.has_news(PartitionData(0, 0, 5, 5, 0))
    assert not cached.has_news(PartitionData(0, 0, 5, 5, 0))


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
    session.recheck_all()
    assert set(session.due) == {(b"t", 0), (b"t", 1)}
    session.due.clear()
    session.recheck_all()
    assert not session.due
