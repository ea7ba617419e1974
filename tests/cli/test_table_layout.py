"""Tables in terminals that are too narrow for them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kept.cli.table_layout import NOTHING, fitted, width_of, wrapped

STATUS = [
    ["NODE", "ROLES", "STATE", "ADDRESS", "RACK", "EPOCH", "METADATA LAG", "LEADERS", "REPLICAS"],
    ["0", "broker,controller", "active", "localhost:21092", "-", "3", "0", "35", "105"],
    ["1", "broker,controller", "fenced", "kept-1.example:9092", "-", "412", "-", "0", "105"],
]
NUMERIC = [True, False, False, False, False, True, True, True, True]
WHY = [
    ["TOPIC", "PARTITION", "SIZE", "LAST COMPACTION", "WHY"],
    ["customer-orders-of-the-region", "0", "52.2 KiB", "never", "nothing is cleanable from 0 on"],
    ["users", "1", "156 B", "never", "-"],
]


def test_columns_with_nothing_in_them_make_room_first():
    assert fitted(STATUS, NUMERIC, 78) == [
        "                                                   METADATA",
        "NODE  ROLES       STATE   ADDRESS           EPOCH       LAG  LEADERS  REPLICAS",
        "   0  broker,     active  localhost:21092       3         0       35       105",
        "      controller",
        "   1  broker,     fenced  kept-1.example:     412         -        0       105",
        "      controller          9092",
    ]


def test_a_few_words_that_end_a_row_go_below_it_before_each_row_is_a_list():
    """As of ``kept topic describe`` after a pass, in 80 columns."""
    described = [
        ["PARTITION", "LEADER", "HIGH WATERMARK", "SIZE", "RATIO", "LAST COMPACTION", "WHY"],
        ["0", "0", "86", "113 B", "100 %", "2026-11-28T11:09:01.971Z", "all is clean"],
    ]
    assert fitted(described, [True, True, True, False, False, False, False], 72) == [
        "                            HIGH",
        "PARTITION  LEADER      WATERMARK  SIZE   RATIO  LAST COMPACTION",
        "        0       0             86  113 B  100 %  2026-11-28T11:09:01.971Z",
        "    why: all is clean",
    ]


def test_the_sentence_that_ends_a_row_goes_below_it():
    assert fitted(WHY, [False, True, False, False, False], 56) == [
        "                                              LAST",
        "TOPIC                    PARTITION  SIZE      COMPACTION",
        "customer-orders-of-the-          0  52.2 KiB  never",
        "region",
        "    why: nothing is cleanable from 0 on",
        "users                            1  156 B     never",
    ]


def test_a_row_is_lines_in_a_narrow_terminal():
    assert fitted(WHY, [False, True, False, False, False], 32) == [
        "TOPIC            customer-",
        "                 orders-of-the-",
        "                 region",
        "PARTITION        0",
        "SIZE             52.2 KiB",
        "LAST COMPACTION  never",
        "WHY              nothing is",
        "                 cleanable from",
        "                 0 on",
        "",
        "TOPIC            users",
        "PARTITION        1",
        "SIZE             156 B",
        "LAST COMPACTION  never",
        "WHY              -",
    ]


def test_a_time_is_whole():
    head, row = ["VALUE", "TIMESTAMP"], ["some words and more words", "2026-11-28T06:22:21.223Z"]
    shown = fitted([head, row], [False, False], 46)
    assert shown[1:] == [
        "some words and more   2026-11-28T06:22:21.223Z",
        "words",
    ]


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("", 5, [""]),
        ("one two", 5, ["one", "two"]),
        ("x" * 12, 5, ["xxxxx", "xxxxx", "xx"]),
        ("a.bc.def", 5, ["a.bc.", "def"]),
        ("52.2 KiB", 8, ["52.2 KiB"]),
        ("日本語", 5, ["日本", "語"]),
        ("日本 語", 6, ["日本", "語"]),
        ("e\u0301" * 5, 5, ["e\u0301" * 5]),
    ],
)
def test_where_a_cell_wraps(text, width, lines):
    assert wrapped(text, width) == lines


def test_wide_characters_take_two_columns():
    rows = [["TOPIC", "GROUP", "STATE"], ["日本語", "x" * 12, "Empty"], ["users", "y", "Stable"]]
    assert fitted(rows, [False] * 3, 26) == [
        "TOPIC  GROUP        STATE",
        "日本語 xxxxxxxxxxxx Empty",
        "users  y            Stable",
    ]


CELLS = st.text("ab1日 -_.:", min_size=1, max_size=40).map(lambda text: text.strip() or NOTHING)
TABLES = st.integers(1, 9).flatmap(
    lambda count: st.tuples(
        st.lists(st.lists(CELLS, min_size=count, max_size=count), min_size=1, max_size=4),
        st.lists(st.booleans(), min_size=count, max_size=count),
    )
)


@given(TABLES, st.integers(40, 160))
@example(([["a a" * 10, "a b" * 10]], [False, False]), 40)
def test_nothing_is_lost_and_all_fits(table, width):
    rows, numeric = table
    rows = [
        [cell[:12] if right else cell for cell, right in zip(row, numeric, strict=True)]
        for row in rows
    ]
    head = [f"COLUMN {chr(67 + number)}" for number in range(len(numeric))]  # no a, b or 1
    lines = fitted([head, *rows], numeric, width)
    assert max(map(width_of, lines)) <= width
    shown, given_too = "".join(lines), "".join(cell for row in rows for cell in row)
    assert all(shown.count(letter) == given_too.count(letter) for letter in "ab1日")
