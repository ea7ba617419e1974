"""Markers come over the newest connection of their node, and over no other one again."""

from __future__ import annotations

from typing import Any

import pytest

from kept.node.kafka.marker_connections import MOST_NODES, MarkerConnections

FIRST, SECOND = "a" * 32, "b" * 32


class Link:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self, why: str = "", **fields: Any) -> None:
        self.aborted = True


def name(number: int, node: int = 1, incarnation: str = FIRST) -> str:
    return f"kept-markers-{node}-{incarnation}-{number}"


def test_a_later_connection_closes_those_before_it_for_good() -> None:
    links, old, new = MarkerConnections(), Link(), Link()
    assert links.admit(name(1), old)
    assert links.admit(name(1), old)
    assert links.admit(name(2), new)
    assert old.aborted
    assert not links.admit(name(1), old), "what still sat in it"
    assert links.admit(name(2), new)
    assert not new.aborted


def test_a_connection_that_was_overtaken_before_its_first_request_is_refused() -> None:
    links, slow, new = MarkerConnections(), Link(), Link()
    assert links.admit(name(10), new)
    assert not links.admit(name(9), slow)
    assert links.admit(name(10), new) and not new.aborted


def test_nodes_do_not_disturb_each_other_and_a_process_begins_anew() -> None:
    links, one, two, again = MarkerConnections(), Link(), Link(), Link()
    assert links.admit(name(5, node=1), one)
    assert links.admit(name(1, node=2), two)
    assert links.admit(name(1, node=1, incarnation=SECOND), again)
    assert (one.aborted, two.aborted, again.aborted) == (True, False, False)


@pytest.mark.parametrize("other", [None, "", "adminclient-1", "kept-markers-1-x-1", name(1) + " "])
def test_others_may_write_markers_as_they_like(other: str | None) -> None:
    links = MarkerConnections()
    assert links.admit(name(7), Link())
    assert links.admit(other, Link()) and links.admit(other, Link())


def test_invented_nodes_are_not_remembered_for_ever() -> None:
    links, link = MarkerConnections(), Link()
    for node in range(MOST_NODES + 10):
        assert links.admit(name(1, node=node), link)
    assert len(links._newest) == MOST_NODES
    assert links.admit(f"kept-markers-1-{FIRST}-{'9' * 5000}", link), "no number of ours"
