"""What each request does to a transactional id, whatever its state: the tables of Kafka's
coordinator, row by row."""

from __future__ import annotations

import itertools

import pytest
from kio.schema.errors import ErrorCode
from msgspec.structs import replace

from kept.node.coordinator.transactions import events as ev
from kept.node.coordinator.transactions import requests as rq
from kept.node.coordinator.transactions import transaction as txn
from kept.node.coordinator.transactions.records import TransactionMetadata, TransactionState
from kept.storage.errors import InvariantViolation
from kept.storage.types import TopicPartition

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)
PID, OTHER_PID, FRESH = 7, 8, 9
NOW = 5_000
STATES = {
    "Empty": txn.EMPTY,
    "Ongoing": txn.ONGOING,
    "CompleteCommit": txn.COMPLETE_COMMIT,
    "CompleteAbort": txn.COMPLETE_ABORT,
}
IDLE = ("Empty", "CompleteCommit", "CompleteAbort")


def held(name: str, epoch: int = 3, *, version: int = 2, last: int = -1) -> TransactionMetadata:
    state = STATES.get(name) or txn.EMPTY
    partitions = frozenset({P0}) if name == "Ongoing" else frozenset()
    start = -1 if name == "Empty" else 4_000
    return TransactionMetadata(
        PID, epoch, 60_000, state, partitions, start, 4_500, PID, -1, last, version
    )


def described(decision: rq.Decision) -> str:
    """A decision in a word or two, as the tables have it."""
    match decision:
        case rq.Refused(error):
            return str(error.value)
        case rq.Unchanged():
            return "none"
        case rq.ProducerIdNeeded():
            return "draw"
        case rq.Transition(m, error):
            answer = f" answers {error.value}" if error is not ev.NO_ERROR else ""
            last = "" if m.last_epoch == -1 else f" last {m.last_epoch}"
            following = "" if m.next_producer_id == -1 else f" next {m.next_producer_id}"
            return f"{m.state.kafka_name} {m.producer_id}/{m.epoch}{last}{following}{answer}"
    raise AssertionError(decision)


# InitProducerId.


def init(
    present: TransactionMetadata | None,
    pid: int = -1,
    epoch: int = -1,
    *,
    pending: bool = False,
    fresh: int | None = FRESH,
    server: int = 2,
) -> rq.Decision:
    event = ev.InitProducerId(1, "bank", 30_000, pid, epoch)
    return rq.decide_init(
        event, present, pending=pending, fresh_producer_id=fresh, server_version=server, now_ms=NOW
    )


@pytest.mark.parametrize(
    ("pid", "epoch", "present", "expected"),
    [
        # Nothing given: the next epoch.
        (-1, -1, held("Idle"), "Empty 7/4"),
        # The present epoch: the next one, and a retry of that is known.
        (PID, 3, held("Idle"), "Empty 7/4 last 3"),
        (PID, 3, held("Idle", 4, last=3), "Empty 7/4 last 3"),
        (PID, 2, held("Idle", 4, last=3), "90"),
        (PID, 5, held("Idle", 4, last=3), "90"),
        (OTHER_PID, 3, held("Idle"), "90"),
        # Exhausted epochs: a new id.
        (-1, -1, held("Idle", 32766), "Empty 9/0"),
        (-1, -1, held("Idle", 32767), "Empty 9/0"),
        (PID, 32766, held("Idle", 32766), "Empty 9/0 last 32766"),
        (PID, 32765, held("Idle", 32766, last=32765), "Empty 7/32766 last 32765"),
        (PID, 32764, held("Idle", 32766, last=32765), "90"),
        (PID, 32765, held("Idle", 32765), "Empty 7/32766 last 32765"),
    ],
)
def test_init_of_an_idle_id(
    pid: int, epoch: int, present: TransactionMetadata, expected: str
) -> None:
    for state in IDLE:
        of_state = replace(
            present, state=STATES[state], start_ms=held(state).start_ms, client_version=2
        )
        decision = init(of_state, pid, epoch)
        assert described(decision) == expected, state
        assert described(init(of_state, pid, epoch, pending=True)) == "51"
        if isinstance(decision, rq.Transition):
            after = decision.metadata
            txn.check_transition(of_state, after)
            assert (after.timeout_ms, after.start_ms, after.partitions) == (30_000, -1, frozenset())
            assert (after.last_update_ms, after.previous_producer_id) == (NOW, PID)


def test_init_of_a_new_id() -> None:
    for given in ((-1, -1), (PID, 3)):
        assert described(init(None, *given)) == "Empty 9/0"
        assert described(init(None, *given, fresh=None)) == "draw"
        assert described(init(None, *given, pending=True)) == "51"
    assert described(init(held("Empty", 32766), fresh=None)) == "draw"


def test_init_whose_response_was_lost_when_the_id_changed() -> None:
    """The producer id given is the one before, at its last epoch."""
    rotated = init(held("CompleteCommit", 32766), PID, 32766)
    assert isinstance(rotated, rq.Transition)
    assert described(init(rotated.metadata, PID, 32766)) == "Empty 9/0 last 32766"
    assert described(init(rotated.metadata, PID, 32765)) == "90"
    # One transition later nobody is that late any more.
    later = txn.prepare_partitions(rotated.metadata, {P0}, 0, NOW)
    assert described(init(later, PID, 32766)) == "90"


@pytest.mark.parametrize(
    ("epoch", "server", "fresh", "expected"),
    [
        (3, 0, None, "PrepareAbort 7/4 answers 51"),
        (3, 1, None, "PrepareAbort 7/4 answers 51"),
        (3, 2, None, "PrepareAbort 7/4 last 3 answers 51"),
        (32766, 1, None, "PrepareAbort 7/32767 answers 51"),
        (32766, 2, None, "draw"),
        (32766, 2, FRESH, "PrepareAbort 7/32767 last 32766 next 9 answers 51"),
        (32767, 0, None, "PrepareAbort 7/32767 answers 51"),
    ],
)
def test_init_fences_who_has_a_transaction_open(
    epoch: int, server: int, fresh: int | None, expected: str
) -> None:
    for given in ((-1, -1), (PID, epoch), (PID, 1)):
        decision = init(held("Ongoing", epoch, version=0), *given, fresh=fresh, server=server)
        assert described(decision) == expected
    assert described(init(held("Ongoing", epoch), OTHER_PID, epoch)) == "90"
    if isinstance(decision, rq.Transition):
        assert decision.metadata.client_version == (2 if server == 2 else 0)
        assert decision.metadata.partitions == {P0}
        assert decision.metadata.start_ms == 4_000


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (ev.InitProducerId(1, "", 1), ErrorCode.invalid_request),
        (ev.InitProducerId(1, "bank", 1, PID, -1), ErrorCode.invalid_request),
        (ev.InitProducerId(1, "bank", 1, -1, 0), ErrorCode.invalid_request),
        (ev.InitProducerId(1, "bank", 0), ErrorCode.invalid_transaction_timeout),
        (ev.InitProducerId(1, "bank", 901), ErrorCode.invalid_transaction_timeout),
        (ev.EndTransaction(1, "", PID, 0, True), ErrorCode.invalid_request),
        (ev.InitProducerId(1, "bank", 900, PID, 0), None),
        (ev.EndTransaction(1, "bank", PID, 0, True), None),
    ],
)
def test_malformed_requests(event: ev.ClientRequest, expected: ErrorCode | None) -> None:
    refused = rq.refuse_malformed(event, 900)
    assert (refused and refused.error) == expected


# AddPartitionsToTxn.


@pytest.mark.parametrize(
    ("present", "pid", "epoch", "partitions", "expected"),
    [
        (None, PID, 3, {P0}, "49"),
        (held("Ongoing"), OTHER_PID, 3, {P0}, "49"),
        (held("Ongoing"), PID, 2, {P0}, "90"),
        (held("Ongoing"), PID, 4, {P0}, "90"),
        (held("Ongoing"), PID, 3, {P0}, "none"),
        (held("Ongoing"), PID, 3, set(), "none"),
        (held("Ongoing"), PID, 3, {P0, P1}, "Ongoing 7/3"),
        (held("Empty"), PID, 3, {P1}, "Ongoing 7/3"),
        (held("CompleteCommit"), PID, 3, {P1}, "Ongoing 7/3"),
        (held("CompleteAbort", last=2), PID, 3, {P1}, "Ongoing 7/3 last 2"),
    ],
)
def test_adding_partitions(
    present: TransactionMetadata | None,
    pid: int,
    epoch: int,
    partitions: set[TopicPartition],
    expected: str,
) -> None:
    for version in (0, 2):
        event = ev.AddPartitions(1, "bank", pid, epoch, frozenset(partitions), version)
        decision = rq.decide_add(event, present, pending=False, now_ms=NOW)
        assert described(decision) == expected
        assert described(rq.decide_add(event, present, pending=True, now_ms=NOW)) == "51"
        if isinstance(decision, rq.Transition):
            after = decision.metadata
            assert after.partitions == present.partitions | partitions
            assert after.start_ms == (4_000 if present.state is txn.ONGOING else NOW)
            assert (after.client_version, after.timeout_ms) == (version, 60_000)


def test_verifying_partitions() -> None:
    def verify(present: TransactionMetadata | None, pid: int = PID, epoch: int = 3) -> object:
        event = ev.VerifyPartitions(1, "bank", pid, epoch, frozenset({P0, P1}))
        return rq.decide_verify(event, present)

    assert verify(None) == ev.VerifyPartitionsResult(rq.INVALID_MAPPING)
    assert verify(held("Ongoing"), OTHER_PID) == ev.VerifyPartitionsResult(rq.INVALID_MAPPING)
    assert verify(held("Ongoing"), epoch=2) == ev.VerifyPartitionsResult(rq.FENCED)
    assert verify(held("Ongoing")) == ev.VerifyPartitionsResult(absent=frozenset({P1}))
    for state in IDLE:
        assert verify(held(state)) == ev.VerifyPartitionsResult(absent=frozenset({P0, P1}))
    for is_commit in (True, False):
        ending = txn.prepare_end(held("Ongoing"), is_commit=is_commit, client_version=0, now_ms=NOW)
        assert verify(ending) == ev.VerifyPartitionsResult(rq.CONCURRENT)
        assert verify(ending, epoch=2) == ev.VerifyPartitionsResult(rq.FENCED)


# EndTxn.


def end(
    present: TransactionMetadata | None,
    pid: int,
    epoch: int,
    is_commit: bool,
    version: int,
    *,
    pending: bool = False,
    fresh: int | None = None,
) -> rq.Decision:
    event = ev.EndTransaction(1, "bank", pid, epoch, is_commit, version)
    return rq.decide_end(event, present, pending=pending, fresh_producer_id=fresh, now_ms=NOW)


TV1_ENDS = """
Empty           48                48
Ongoing         PrepareCommit 7/3 PrepareAbort 7/3
CompleteCommit  none              48
CompleteAbort   48                none
"""


@pytest.mark.parametrize("row", TV1_ENDS.strip().splitlines())
def test_ends_of_tv1_producers(row: str) -> None:
    state, *expected = row.replace(" 7/3", "@").split()
    for wanted, is_commit in zip(expected, (True, False), strict=True):
        present = held(state, version=0)
        decision = end(present, PID, 3, is_commit, 0)
        assert described(decision) == wanted.replace("@", " 7/3")
        assert described(end(present, PID, 3, is_commit, 0, pending=True)) == "51"
        # Strangers hear of themselves first.
        assert described(end(present, PID, 2, is_commit, 0, pending=True)) == "90"
        assert described(end(present, PID, 4, is_commit, 0)) == "90"
        assert described(end(present, OTHER_PID, 3, is_commit, 0, pending=True)) == "49"
        assert described(end(None, PID, 3, is_commit, 0)) == "49"
        if isinstance(decision, rq.Transition):
            assert decision.metadata.start_ms == 4_000
            assert decision.metadata.partitions == {P0}
            assert decision.metadata.client_version == 0


#                 commit new      commit retry  abort new     abort retry
TV2_ENDS = """
Empty             48              90            PrepareAbort  90
Ongoing           PrepareCommit   90            PrepareAbort  90
CompleteCommit    48              none          PrepareAbort  48
CompleteAbort     48              48            PrepareAbort  none
"""


@pytest.mark.parametrize("row", TV2_ENDS.strip().splitlines())
def test_ends_of_tv2_producers(row: str) -> None:
    state, *expected = row.split()
    cases = itertools.product((True, False), (3, 2))
    for wanted, (is_commit, epoch) in zip(expected, cases, strict=True):
        present = held(state)
        decision = end(present, PID, epoch, is_commit, 2)
        wanted = wanted if wanted[0] != "P" else wanted + " 7/4 last 3"
        assert described(decision) == wanted, (is_commit, epoch)
        assert described(end(present, PID, epoch, is_commit, 2, pending=True)) == "51"
        assert described(end(present, PID, 4, is_commit, 2)) == "90"
        assert described(end(present, PID, 1, is_commit, 2)) == "90"
        assert described(end(present, OTHER_PID, epoch, is_commit, 2)) == "49"
        assert described(end(None, PID, epoch, is_commit, 2)) == "49"
        if isinstance(decision, rq.Transition):
            after = decision.metadata
            assert after.start_ms == (4_000 if state == "Ongoing" else NOW)
            txn.check_transition(present, after)


def test_an_end_behind_a_tv1_transaction_is_no_retry() -> None:
    """Its epoch is one more since somebody initialized, who may have fenced this producer."""
    for is_commit, state in ((True, "CompleteCommit"), (False, "CompleteAbort")):
        assert described(end(held(state, version=0), PID, 2, is_commit, 2)) == "90"


def test_the_last_epoch_of_a_tv2_producer() -> None:
    ongoing = held("Ongoing", 32766)
    assert described(end(ongoing, PID, 32766, True, 2)) == "draw"
    ending = end(ongoing, PID, 32766, True, 2, fresh=FRESH)
    assert described(ending) == "PrepareCommit 7/32767 last 32766 next 9"
    assert isinstance(ending, rq.Transition)
    done = txn.prepare_complete(ending.metadata, NOW)
    assert described(rq.Transition(done)) == "CompleteCommit 9/0 last 32766"
    assert (done.previous_producer_id, done.partitions) == (PID, frozenset())
    # A retry comes with the former id and epoch.
    assert described(end(done, PID, 32766, True, 2)) == "none"
    assert described(end(done, PID, 32766, False, 2)) == "48"
    assert described(end(done, PID, 32765, True, 2)) == "49"
    assert described(end(done, FRESH, 0, False, 2)) == "PrepareAbort 9/1 last 0"
    # An id that was rotated by InitProducerId ended nothing.
    rotated = init(done, FRESH, 0)
    assert isinstance(rotated, rq.Transition)
    assert described(end(rotated.metadata, PID, 32766, True, 2)) == "49"


# Transitions.


VALID = """
Empty           <- none Empty CompleteCommit CompleteAbort
Ongoing         <- Ongoing Empty CompleteCommit CompleteAbort
PrepareCommit   <- Ongoing
PrepareAbort    <- Ongoing
CompleteCommit  <- PrepareCommit
CompleteAbort   <- PrepareAbort
none            <- Empty CompleteCommit CompleteAbort
"""


def test_transitions() -> None:
    names = {state.kafka_name: state for state in TransactionState}
    for row in VALID.strip().splitlines():
        after, before = row.split("<-")
        for name in ("none", *names):
            states = [
                None if n == "none" else replace(held("Empty", version=0), state=names[n])
                for n in (name, after.strip())
            ]
            valid = name in before.split()
            if valid:
                txn.check_transition(*states)
            else:
                with pytest.raises(InvariantViolation):
                    txn.check_transition(*states)
    aborted = replace(held("Empty"), state=txn.PREPARE_ABORT)
    for name in IDLE:
        txn.check_transition(held(name), aborted)
    with pytest.raises(InvariantViolation, match="epoch 2 after 3"):
        txn.check_transition(held("Empty"), held("Empty", 2))
