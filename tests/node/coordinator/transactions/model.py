"""What Kafka's transaction protocol says of one transactional id, as tables: the judge of the core.

Written from the protocol alone, and in another way than the core: an id is a dictionary, the ends
are tables of words. What a request does is a word for its response, and the next dictionary.
"""

from __future__ import annotations

from typing import Any

Held = dict[str, Any]
"""status, pid, epoch, and previous (pid), next (pid), last (epoch), timeout, partitions, start,
version."""

BUMPING = 2
MAX = 32767

TV1_END = {
    # status: (commit, abort)
    "Empty": ("48", "48"),
    "Ongoing": ("PrepareCommit", "PrepareAbort"),
    "CompleteCommit": ("none", "48"),
    "CompleteAbort": ("48", "none"),
}
TV2_END = {
    # status: (commit new, commit retry, abort new, abort retry)
    "Empty": ("48", "90", "PrepareAbort", "90"),
    "Ongoing": ("PrepareCommit", "90", "PrepareAbort", "90"),
    "CompleteCommit": ("48", "none", "PrepareAbort", "48"),
    "CompleteAbort": ("48", "48", "PrepareAbort", "none"),
}
FOLLOWS = {
    ("none", "Empty"),
    ("Empty", "Empty"),
    ("CompleteCommit", "Empty"),
    ("CompleteAbort", "Empty"),
    ("Empty", "Ongoing"),
    ("Ongoing", "Ongoing"),
    ("CompleteCommit", "Ongoing"),
    ("CompleteAbort", "Ongoing"),
    ("Ongoing", "PrepareCommit"),
    ("Ongoing", "PrepareAbort"),
    ("Empty", "PrepareAbort"),
    ("CompleteCommit", "PrepareAbort"),
    ("CompleteAbort", "PrepareAbort"),
    ("PrepareCommit", "CompleteCommit"),
    ("PrepareAbort", "CompleteAbort"),
    ("Empty", "none"),
    ("CompleteCommit", "none"),
    ("CompleteAbort", "none"),
}

Outcome = tuple[str, Held | None]
"""The response once the dictionary, if there is one, is committed; "draw" wants a producer id."""


def init(
    h: Held | None, pid: int, epoch: int, *, timeout: int, fresh: int | None, tv: int
) -> Outcome:
    if h is None:
        if fresh is None:
            return "draw", None
        return "none", {
            "status": "Empty",
            "pid": fresh,
            "epoch": 0,
            "previous": fresh,
            "next": -1,
            "last": -1,
            "timeout": timeout,
            "partitions": frozenset(),
            "start": -1,
            "version": 0,
        }
    if h["status"].startswith("Prepare"):
        return "51", None
    given = pid != -1
    if given and pid != h["pid"] and not (pid == h["previous"] and epoch >= MAX - 1):
        return "90", None
    if h["status"] == "Ongoing":
        word, fenced = fence(h, fresh, tv)
        return ("51" if fenced else word), fenced
    empty = h | {
        "status": "Empty",
        "previous": h["pid"],
        "timeout": timeout,
        "partitions": frozenset(),
        "start": -1,
    }
    if h["epoch"] >= MAX - 1 and (not given or epoch == h["epoch"]):
        if fresh is None:
            return "draw", None
        return "none", empty | {"pid": fresh, "epoch": 0, "last": h["epoch"] if given else -1}
    if not given:
        return "none", empty | {"epoch": h["epoch"] + 1, "last": -1}
    if epoch == h["epoch"]:
        return "none", empty | {"epoch": h["epoch"] + 1, "last": h["epoch"]}
    if epoch == h["last"]:
        return "none", empty
    return "90", None


def fence(h: Held, fresh: int | None, tv: int) -> Outcome:
    """The open transaction is aborted, one epoch further."""
    fenced = h | {
        "status": "PrepareAbort",
        "previous": h["pid"],
        "epoch": min(h["epoch"] + 1, MAX),
        "version": tv if tv == BUMPING else 0,
    }
    if tv == BUMPING:
        fenced["last"] = h["epoch"]
        if h["epoch"] >= MAX - 1:
            if fresh is None:
                return "draw", None
            fenced["next"] = fresh
    elif h["epoch"] < MAX:
        fenced["last"] = -1
    return "none", fenced


def add(h: Held | None, pid: int, epoch: int, partitions: frozenset, version: int) -> Outcome:
    if h is not None and h["status"].startswith("Prepare"):
        return "51", None
    if h is None or h["pid"] != pid:
        return "49", None
    if h["epoch"] != epoch:
        return "90", None
    opened = h["status"] == "Ongoing"
    if opened and not partitions - h["partitions"]:
        return "none", None
    return "none", h | {
        "status": "Ongoing",
        "previous": pid,
        "version": version,
        "partitions": h["partitions"] | partitions,
        "start": h["start"] if opened else "now",
    }


def verify(h: Held | None, pid: int, epoch: int, partitions: frozenset) -> tuple[str, frozenset]:
    if h is None or h["pid"] != pid:
        return "49", frozenset()
    if h["epoch"] != epoch:
        return "90", frozenset()
    if h["status"].startswith("Prepare"):
        return "51", frozenset()
    return "none", partitions - h["partitions"]


def end(
    h: Held | None,
    pid: int,
    epoch: int,
    *,
    commit: bool,
    version: int,
    pending: bool,
    fresh: int | None,
) -> Outcome:
    if h is not None and h["status"].startswith("Prepare"):
        pending = True
    if version < BUMPING:
        if h is None or h["pid"] != pid:
            return "49", None
        if h["epoch"] != epoch:
            return "90", None
        word = "51" if pending else TV1_END[h["status"]][0 if commit else 1]
        changes: Held = {}
    else:
        if pending:
            return "51", None
        if h is None:
            return "49", None
        behind_tv2 = h["version"] == BUMPING and h["status"] != "Ongoing"
        overflow = (
            behind_tv2 and h["pid"] != pid == h["previous"] and (epoch, h["epoch"]) == (MAX - 1, 0)
        )
        if h["pid"] != pid and not overflow:
            return "49", None
        retry = overflow or (epoch == h["epoch"] - 1 and behind_tv2)
        if not retry and epoch != h["epoch"]:
            return "90", None
        word = TV2_END[h["status"]][(0 if commit else 2) + retry]
        changes = {"epoch": min(h["epoch"] + 1, MAX), "last": h["epoch"]}
        if word.startswith("Prepare") and h["epoch"] >= MAX - 1:
            if fresh is None:
                return "draw", None
            changes["next"] = fresh
    if not word.startswith("Prepare"):
        return word, None
    start = h["start"] if h["status"] == "Ongoing" else "now"
    ended = {"status": word, "version": version, "start": start, "previous": h["pid"]}
    return "none", h | ended | changes


def complete(h: Held) -> Held:
    done = h | {
        "status": h["status"].replace("Prepare", "Complete"),
        "partitions": frozenset(),
        "previous": h["pid"],
        "next": -1,
    }
    return done if h["next"] == -1 else done | {"pid": h["next"], "epoch": 0}
