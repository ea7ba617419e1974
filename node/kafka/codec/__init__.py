"""The codec of the hot path: Produce and Fetch, parsed in place and written by hand.

kio serves every other API; here a request costs a microsecond or two, and no object per record
exists. ``produce`` and ``fetch`` are the codec in plain Python: the specification, and what serves
where Cython's (``_codec``) was not compiled or ``KEPT_KERNEL=python`` is set. The functions below
are those in force. Tests hold both against kio's own reader and writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from mmap import mmap
from typing import TYPE_CHECKING, Any

from kept.kernels import python_is_chosen
from kept.node.kafka.codec.fetch import encode as encode_fetch
from kept.node.kafka.codec.fetch import parse as parse_fetch
from kept.node.kafka.codec.produce import PlainRequest
from kept.node.kafka.codec.produce import parse as parse_produce

__all__ = ["encode_fetch", "encode_run", "parse_fetch", "parse_produce", "parse_run"]


def parse_run(  # noqa: PLR0917
    buffer: bytearray | mmap,  # noqa: ARG001
    start: int,  # noqa: ARG001
    end: int,  # noqa: ARG001
    frames: int,  # noqa: ARG001
    size: int,  # noqa: ARG001
    longest: int,  # noqa: ARG001
) -> list[PlainRequest]:
    """The Produce requests of one plain batch each whose frames come one after another from
    ``buffer[start:end]`` on; the first request of another kind ends the run.

    A plain batch belongs to no transaction, has acks 1 or -1, and needs no thread to be checked. At
    most ``frames``, none longer than ``longest`` bytes, and none after ``size`` bytes. Plain Python
    reads no runs: there each request is parsed by itself.
    """
    return []


def encode_run(entries: Sequence[tuple[PlainRequest, Any, Sequence[int]]]) -> bytes:
    """The frames of the responses to requests of :func:`parse_run`, one after another.

    An entry is (request, anything, (base offset, last offset, append time, log start offset, ...)).
    """
    raise AssertionError(f"{len(entries)} requests of a run, which plain Python does not read")


if not TYPE_CHECKING and not python_is_chosen():
    with suppress(ImportError):
        from kept.node.kafka.codec._codec import (
            encode_fetch,
            encode_run,
            parse_fetch,
            parse_produce,
            parse_run,
        )
