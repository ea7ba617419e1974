"""Notes on a local disk: replaced as a whole, by whoever comes, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kept.pipeline.jobs import job_directory


def test_two_who_replace_a_note_at_once_both_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, replace = tmp_path / "note", os.replace
    (tmp_path / ".note.crc").write_text("of what Hadoop wrote")

    def overtaken(draft: Path, path: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        job_directory._replace(note, "the other")
        assert note.read_text() == "the other"
        replace(draft, path)

    monkeypatch.setattr(os, "replace", overtaken)
    job_directory._replace(note, "mine")
    assert note.read_text() == "mine" and os.listdir(tmp_path) == ["note"]


def test_a_note_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "note"
    job_directory._replace(note, "old")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        job_directory._replace(note, "new")
    assert note.read_text() == "old" and os.listdir(tmp_path) == ["note"]
