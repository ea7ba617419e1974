"""What a request's parameters may be."""

from __future__ import annotations

import pytest

from kept.node.http.messages import HttpRequest
from kept.node.http.parameters import Parameters
from kept.storage.errors import InvalidRequest

LONGEST = "x" * 32_767


def parameters(**body):
    return Parameters(HttpRequest("POST", "/", {}, body))


@pytest.mark.parametrize("longest", [LONGEST, "\N{GREEK SMALL LETTER OMEGA}" * 16_383])
def test_a_text_is_no_longer_than_kafka_takes(longest: str) -> None:
    """A node would close the connection, and whether it was done would be unknown."""
    too_long = "xx" + longest
    given = parameters(topic=longest, set={longest: "1"}, delete=[longest])
    assert given.text("topic") == longest
    assert given.settings("set") == {longest: "1"} and given.texts("delete") == [longest]
    refused = parameters(topic=too_long, set={too_long: "1"}, delete=[too_long])
    for ask in (lambda: refused.text("topic"), lambda: refused.texts("delete")):
        with pytest.raises(InvalidRequest, match="32767 is the longest"):
            ask()
    with pytest.raises(InvalidRequest, match="set: a setting's name has 3276"):
        refused.settings("set")
