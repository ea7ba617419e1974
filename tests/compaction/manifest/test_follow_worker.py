"""The job of following as it travels to a worker process, and the process itself."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest

from kept.compaction.manifest import follow, follow_worker
from kept.storage import layout
from kept.storage.types import Generation
from tests.support.follower_pair import Pair, fill


@pytest.fixture
def both(kit):
    """A follower with a generation applied, boundaries of its own, and the next one to apply."""
    both = Pair(kit, segment_bytes=1500)
    fill(both, 40, 7, rolls=(10, 20))
    both.leader.clean()
    both.fetch(roll_at=lambda base: base == 13)
    both.apply()
    fill(both, 60, 7, rolls=(15, 30))
    both.leader.clean()
    both.fetch(roll_at=lambda base: base in (51, 77))
    return both


def test_a_job_arrives_as_it_was(both):
    world = both.follower
    job = follow.job_for(world.log, both.generation(), both.previous(), world.now)
    line = follow_worker.encode(job, world.state.applied, 1e18)
    assert "\n" not in line
    assert follow_worker.decode(json.loads(line), world.disk) == job
    assert len({piece.base_offset for piece in job.pieces}) > 1


def test_a_worker_builds_what_this_process_builds(both, tmp_path):
    world = both.follower
    job = follow.job_for(world.log, both.generation(), None, world.now)
    for name in world.disk.listdir(job.directory):
        (tmp_path / name).write_bytes(world.disk.read(f"{job.directory}/{name}"))
    here = follow_worker.run_here(job, world.state.applied, world.disk)
    there = replace(job, directory=str(tmp_path))
    question = follow_worker.encode(there, Generation(*world.state.applied), 1e18) + "\n"
    done = subprocess.Popen(
        follow_worker.COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    done.stdin.write(question)
    done.stdin.flush()
    said = json.loads(done.stdout.read().splitlines()[-1])
    done.stdin.close()
    assert done.wait() == 0
    done.stdout.close()
    assert said["result"]["records_removed"] == here.records_removed
    assert said["result"]["bytes_after"] == here.bytes_after > 0
    made = layout.manifest_file("", *job.manifest.generation) + layout.TEMPORARY
    assert (tmp_path / made[1:]).read_bytes() == world.disk.read(f"{job.directory}{made}")


def test_a_missing_record_is_told_with_its_offset(both, tmp_path):
    world = both.follower
    job = follow.job_for(world.log, both.generation(), None, world.now)
    piece = next(piece for piece in job.pieces if piece.output and piece.output.survivors)
    for name in world.disk.listdir(job.directory):
        (tmp_path / name).write_bytes(world.disk.read(f"{job.directory}/{name}"))
    pieces = tuple(
        replace(p, sources=tuple(replace(s, size_bytes=0) for s in p.sources)) if p is piece else p
        for p in job.pieces
    )
    there = replace(job, directory=str(tmp_path), pieces=pieces)
    done = subprocess.Popen(
        follow_worker.COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    done.stdin.write(follow_worker.encode(there, None, 1e18) + "\n")
    done.stdin.flush()
    said = json.loads(done.stdout.read().splitlines()[-1])
    done.stdin.close()
    assert done.wait() == 1
    done.stdout.close()
    assert said["kind"] == "LogsDiffer"
    assert said["offset"] == piece.base_offset + piece.output.survivors.min()
