"""``docs/planted-bugs.md``: every planted bug, its stage, the checks that find it, its seed; and
what may go wrong in transactions, with where it is planted.

``python -m tests.sim.planted_page > docs/planted-bugs.md`` writes the page; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Final

from tests.sim.planted import PLANTED
from tests.sim.runner import STAGES

CORE: Final = "tests/node/coordinator/transactions/test_planted_bugs.py"
DATA: Final = "tests/replication/test_transactions_world.py"
GROUPS: Final = "tests/node/coordinator/groups/test_random_histories.py"
COORDINATOR: Final = "tests/node/coordinator/transactions/test_coordinator.py"
PRODUCE: Final = "tests/node/kafka/handlers/transactions/test_transactional_produce.py"
SIM: Final = "sim"
WIDTH: Final = 140

TRANSACTIONS: Final[tuple[tuple[str, tuple[tuple[str, str], ...]], ...]] = (
    (
        "EndTxn is answered before its decision is committed",
        (
            (CORE, "end_answered_before_it_is_committed"),
            (SIM, "transactions-ended-at-once"),
            (SIM, "transactions-committed-when-written"),
        ),
    ),
    (
        "markers are sent before the decision is committed",
        (
            (CORE, "markers_before_the_end_is_committed"),
            (SIM, "transactions-committed-when-written"),
        ),
    ),
    (
        "a coordinator loads to the end of its log, not to the high watermark",
        ((CORE, "loaded_beyond_the_high_watermark"),),
    ),
    (
        "a coordinator loads before the high watermark has come to the end of its log",
        ((SIM, "transactions-loads-at-once"),),
    ),
    (
        "a load forgets the markers of what was decided",
        ((CORE, "markers_forgotten_at_load"), (SIM, "transactions-markers-not-sent-again")),
    ),
    (
        "an append that is late is forgotten, and the next decision is contrary to it",
        ((CORE, "late_append_forgotten"), (SIM, "transactions-late-is-forgotten")),
    ),
    (
        "a transaction is complete with its first marker",
        ((CORE, "completed_with_the_first_marker"), (SIM, "transactions-contrary")),
    ),
    (
        "NOT_LEADER_OR_FOLLOWER counts as written",
        ((CORE, "another_leader_counts_as_written"), (SIM, "transactions-marker-not-written")),
    ),
    ("a partition without a leader counts as deleted", ((CORE, "no_leader_counts_as_deleted"),)),
    (
        "a marker counts as written that got no answer",
        ((SIM, "transactions-unanswered-is-written"),),
    ),
    (
        "coordinator epochs of markers are not compared",
        ((DATA, "_coordinator_epoch_not_compared"), (SIM, "transactions-coordinators-unordered")),
    ),
    ("epochs of markers are not compared (version 2)", ((DATA, "_marker_epoch_not_compared"),)),
    (
        "a marker of an equal epoch that ends nothing is refused (KAFKA-19999)",
        ((DATA, "_equal_epoch_refused"),),
    ),
    (
        "the first batch of a transaction needs no proof",
        ((DATA, "_no_guard"), (SIM, "transactions-not-waited-for")),
    ),
    ("a proof outlives the marker", ((DATA, "_guard_survives_the_marker"),)),
    (
        "a coordinator that is deposed verifies from memory",
        ((COORDINATOR, "test_who_may_be_fenced_confirms_no_partition"),),
    ),
    (
        "a leader believes a coordinator whose successor it knows",
        (
            (PRODUCE, "test_the_yes_of_a_coordinator_that_was_replaced_counts_for_nothing"),
            (SIM, "transactions-replaced-believed"),
        ),
    ),
    (
        "a coordinator that is deposed says from memory that a transaction ended, or that a "
        "producer is fenced",
        (
            (COORDINATOR, "test_what_is_final_and_said_from_memory_needs_a_proof"),
            (SIM, "transactions-from-memory"),
        ),
    ),
    (
        "duplicates are looked for after the coordinator was asked",
        ((DATA, "_duplicates_after_asking"),),
    ),
    (
        "a fence raises no epoch",
        ((CORE, "fence_without_a_further_epoch"), (SIM, "transactions-same-epoch")),
    ),
    ("a fence raises the epoch twice", ((CORE, "fence_with_two_further_epochs"),)),
    (
        "the next producer id is lost at a failover (KAFKA-20310)",
        ((CORE, "next_producer_id_lost_at_a_failover"),),
    ),
    (
        "an EndTxn that comes again ends the next transaction",
        (
            (CORE, "retry_of_an_end_ends_the_next"),
            (SIM, "transactions-ended-by-the-one-before"),
        ),
    ),
    (
        "a connection that its producer gave up is served (version 1)",
        ((CORE, "stale_connection_served"), (SIM, "transactions-stale-connection")),
    ),
    (
        "a connection that its producer gave up at another node, which led meanwhile, is served",
        (
            (COORDINATOR, "test_connections_of_before_another_node_may_have_led_are_stale"),
            (SIM, "transactions-connection-of-before"),
        ),
    ),
    (
        "a marker over a connection that its coordinator gave up is written",
        (
            (
                "tests/node/kafka/test_marker_connections.py",
                "test_a_connection_that_was_overtaken_before_its_first_request_is_refused",
            ),
            (SIM, "transactions-late-marker"),
        ),
    ),
    (
        "a marker is written over a connection that its coordinator gave up before this leader "
        "led, which led already once",
        (
            (
                "tests/node/kafka/handlers/transactions/test_write_txn_markers.py",
                "test_markers_over_a_connection_older_than_the_leadership_are_late",
            ),
            (SIM, "transactions-marker-of-before"),
        ),
    ),
    (
        "the last stable offset is the high watermark",
        ((DATA, "_stable_is_committed"), (SIM, "transactions-lso-is-hw")),
    ),
    (
        "the last stable offset passes markers that are not committed",
        ((DATA, "_uncommitted_markers_count"),),
    ),
    (
        "an abort is not in the index",
        ((DATA, "_no_index_entry"), (SIM, "transactions-aborts-unlisted")),
    ),
    ("a plain batch is taken inside a transaction", ((DATA, "_plain_batch_taken"),)),
    (
        "offsets of an open transaction are shown, or lost at a load",
        (
            (GROUPS, "26 pending offsets are shown"),
            (GROUPS, "26 pending offsets are lost at unload"),
            (SIM, "transactions-offsets-unheld"),
            (SIM, "transactions-pending-offsets-lost"),
        ),
    ),
    (
        "of two commits of an offset the later record does not count",
        ((GROUPS, "27 the larger record offset is ignored"),),
    ),
    (
        "an id, or a producer, expires that has a transaction open",
        ((CORE, "open_transaction_expires"), (SIM, "transactions-open-expires")),
    ),
    ("the first sequence after a marker is not checked", ((DATA, "_first_sequence_unchecked"),)),
    (
        "a marker waits for a partition that was deleted",
        ((SIM, "transactions-deleted-waited-for"),),
    ),
    ("transactions time out by a clock that is set", ((CORE, "timeouts_by_the_wall_clock"),)),
    (
        "an answer to the marker of an old epoch removes the one of the new epoch (KAFKA-16352)",
        ((CORE, "test_an_answer_of_an_old_epoch_that_counts_for_the_new_one_is_found"),),
    ),
)
"""What may go wrong, and where it is planted: a file of tests and a name in it, or ``SIM`` and the
name of a bug. Some have a test of their own, for they need too many things in a row."""


def item(mark: str, text: str) -> list[str]:
    """A point of a list."""
    rest = " " * (len(mark) + 1)
    return wrap(
        text,
        WIDTH,
        initial_indent=f"{mark} ",
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def page() -> Iterator[str]:
    """Its lines."""
    yield "# Planted bugs"
    yield ""
    yield "Each of these is put into the running code on purpose, one at a time, and one of the"
    yield "named checks must find it, at the seed or at one of the next 24; without it that seed is"
    yield "clean (`tests/sim/test_planted.py`). [simulation.md](simulation.md) says what stages and"
    yield "checks are. `python -m tests.sim.planted_page` writes this page."
    for stage in STAGES:
        yield ""
        yield f"## Stage `{stage}`"
        yield ""
        for bug in PLANTED.values():
            if bug.stage == stage:
                checks = ", ".join(f"`{check}`" for check in bug.checks)
                yield from item(
                    "-", f"`{bug.name}`, seed {bug.seed}: {bug.rule}. Found by {checks}."
                )
    yield ""
    yield "## Transactions: what may go wrong, and where it is planted"
    yield ""
    yield "Stage `transactions` runs whole nodes. Three more worlds run cores alone, and far more"
    yield "histories of them: the coordinator, the data path, and groups."
    yield ""
    for number, (what, places) in enumerate(TRANSACTIONS, 1):
        shown = [f"`{name}`" + ("" if path == SIM else f" (`{path}`)") for path, name in places]
        yield from item(f"{number}.", f"{what}: {'; '.join(shown)}")


if __name__ == "__main__":
    print("\n".join(page()))
