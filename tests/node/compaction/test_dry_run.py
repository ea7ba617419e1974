"""Why a dry run failed, as clients are told it."""

from __future__ import annotations

import asyncio

import pytest

from kept.node.compaction.dry_run import DryRunFailed, DryRuns
from kept.storage.types import LogConfig


def test_a_file_that_is_not_there_is_told_without_its_path_and_logged_with_it(
    tmp_path, capfd
) -> None:
    async def go() -> None:
        await DryRuns().find_key(
            str(tmp_path), LogConfig(), key=b"k", sources=[], clean_to=0, applied=(0, 1)
        )

    with pytest.raises(DryRunFailed) as failed:
        asyncio.run(go())
    assert failed.value.client_message == (
        "FileNotFoundError: No such file or directory; the node's log has the details"
    )
    said = capfd.readouterr().err
    assert f"{tmp_path}/manifest-0-1" in said and "dry run failed" in said
