"""The recording is whole: every request in every version, with every case of bindings."""

from __future__ import annotations

import json
from typing import Any

from tests.golden.authorization.asked import ASKED, CASES
from tests.golden.authorization.record import GOLDEN
from tests.golden.authorization.world import fold, unfold

RECORDED = json.loads(GOLDEN.read_text())


def test_it_is_whole_and_folds_and_unfolds() -> None:
    assert list(RECORDED) == [asked.name for asked in ASKED]
    answers = unfold(RECORDED)
    assert all(list(by_case) == list(CASES) for by_case in answers.values())
    assert fold(answers) == RECORDED


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(each) for key, each in value.items()}
    return sorted(map(_sorted, value), key=str) if isinstance(value, list) else value


def test_nobody_without_a_binding_is_told_what_is_there() -> None:
    """What is there and what is not are answered alike; only ids tell, in Kafka."""
    telling = set()
    for (name, version), by_case in unfold(RECORDED).items():
        told = by_case["nothing"]
        exchanged = told.replace("secret", "?").replace("missing", "secret").replace("?", "missing")
        if _sorted(json.loads(told)) != _sorted(json.loads(exchanged)):
            telling.add((name, version))
    assert telling == {
        *(("Produce", version) for version in (13,)),
        *(("Fetch", version) for version in range(13, 19)),
        *(("Metadata of ids", version) for version in (12, 13)),
        ("DeleteTopics of ids", 6),
    }
