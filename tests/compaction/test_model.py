"""A cleaned log equals a ten-line model, over random histories: codecs, tombstones, keyless
records, both timestamp types, idempotent producers, small maps, a clock that advances past
horizons, restarts."""

from collections import namedtuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kept.storage.types import Codec, TimestampType

R = namedtuple("R", "offset timestamp key value batch")
RETENTION = 1000
NEVER = 1 << 62


def latest(of_key):
    return of_key[-1:]


def latest_2(of_key):
    for i, r in enumerate(of_key):
        if r.value is None and i:
            return latest_2(of_key[i:])
    return of_key[-2:]


def highest(of_key):
    return [max(of_key, key=lambda r: (r.timestamp, r.offset))]


def model(log, end, now, horizons, strategy):
    """The records that a cleaner leaves of ``log`` when it cleans below ``end``."""
    keys = {}
    for r in log:
        if r.offset < end and r.key is not None:
            keys.setdefault(r.key, []).append(r)
    left = [r for of_key in keys.values() for r in strategy(of_key)]
    left = [r for r in left if r.value is not None or horizons.get(r.batch, NEVER) > now]
    for r in left:
        if r.value is None:
            horizons.setdefault(r.batch, now + RETENTION)
    return sorted(left) + [r for r in log if r.offset >= end]


rows = st.lists(
    st.tuples(
        st.sampled_from([None, b"", b"a", b"b", b"c", b"user.1", b"user.2", b"long" * 40]),
        st.sampled_from([None, None, b"", b"v", b"w" * 200]),
        st.integers(0, 50),
    ),
    min_size=1,
    max_size=6,
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("batch"), rows, st.sampled_from(list(Codec)), st.booleans()),
        st.tuples(st.just("roll")),
        st.tuples(st.just("clean"), st.sampled_from([0, 1, 600, 1001]), st.integers(2, 6)),
        st.tuples(st.just("expire"), st.sampled_from([1, 600, 1001])),
        st.tuples(st.just("reopen")),
    ),
    min_size=1,
    max_size=25,
)
STRATEGIES = {
    "latest": (latest, {}),
    "latest-n": (latest_2, {"kept.compaction.latest.n": "2"}),
    "highest-version": (highest, {}),
}


def run(world, history, strategy, append_time, segment_bytes):
    pick, raw = STRATEGIES[strategy]
    w = world(
        delete_retention_ms=RETENTION,
        segment_bytes=segment_bytes,
        compaction_strategy=strategy,
        raw=raw,
        message_timestamp_type=TimestampType(int(append_time)),
        index_interval_bytes=50,
    )
    log, horizons, sequence = [], {}, 0
    for kind, *args in history:
        if kind == "batch":
            given_rows, codec, idempotent = args
            base = w.append(
                *((key, value, w.now - ago) for key, value, ago in given_rows),
                codec=codec,
                pid=7 if idempotent else -1,
                sequence=sequence if idempotent else -1,
            )
            sequence += len(given_rows) if idempotent else 0
            for i, (key, value, ago) in enumerate(given_rows):
                timestamp = w.now if append_time else w.now - ago
                log.append(R(base + i, timestamp, key, value, base))
        elif kind == "roll":
            w.roll()
        elif kind == "reopen":
            w.log.close()
            w.open()
        else:
            w.now += args[0]
            limits = {"dedupe_buffer_bytes": args[1] * 16} if len(args) > 1 else {}
            if strategy != "latest":
                limits = {}
            asked = kind == "clean"
            end, dirty = w.log.active_segment.base_offset, w.state.clean_to
            if asked and end > dirty:
                w.clean_all(**limits)
                log = model(log, end, w.now, horizons, pick)
            elif not asked and w.state.end_offset == w.state.clean_to == end:
                w.clean(on_demand=False)
                log = [
                    r
                    for r in log
                    if r.offset >= end
                    or r.value is not None
                    or horizons.get(r.batch, NEVER) > w.now
                ]
        assert [(r.offset, r.timestamp, r.key, r.value) for r in w.records()] == [
            r[:4] for r in log
        ]
        assert w.log.log_end_offset == (max((h.next_offset for h in w.headers()), default=0)) or (
            w.log.active_segment.size_bytes == 0
        )
    known = w.log.producers.get(7)
    if sequence and known is not None:
        w.append((b"a", b"again"), pid=7, sequence=sequence)


quick = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ARGS = (steps, st.booleans(), st.sampled_from([300, 1 << 30]))


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.usefixtures("each_kernel")
def test_cleaned_log_equals_the_model(world, strategy):
    @quick
    @given(*ARGS)
    def check(history, append_time, segment_bytes):
        run(world, history, strategy, append_time, segment_bytes)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_cleaned_log_equals_the_model_at_length(world, strategy):
    @settings(quick, max_examples=2000)
    @given(*ARGS)
    def check(history, append_time, segment_bytes):
        run(world, history, strategy, append_time, segment_bytes)

    check()
