"""Numbers from outside."""

from __future__ import annotations

import pytest

from kept.storage import layout
from kept.storage.types import decimal_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("9223372036854775807", 2**63 - 1),
        ("", None),
        ("-1", None),
        ("+1", None),
        (" 1", None),
        ("1_0", None),
        ("1.0", None),
        ("\uff11", None),  # full-width 1, which int() takes
        ("\u0661", None),  # Arabic-Indic 1
        ("\u00b2", None),  # superscript 2: a digit to str.isdigit(), no number to int()
        ("1" * 20, None),
        ("1" * 5000, None),  # int() raises ValueError
    ],
)
def test_decimal_numbers(text: str, number: int | None) -> None:
    assert decimal_number(text) == number


def test_names_of_directories_and_files_have_ascii_digits() -> None:
    assert layout.parse_directory_name("t-1") is not None
    assert layout.parse_directory_name("t-\uff11") is None
    assert layout.parse_segment_file("\uff10" * 20 + ".log") is None
