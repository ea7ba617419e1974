"""``kept top``: what moves in a cluster now, on kept or on Apache Kafka."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click

from kept.cli.bootstrap_option import bootstrap_option
from kept.cli.cluster_rates import ClusterRates, Rotation, Row, sorted_rows
from kept.cli.commands.group import is_internal_group
from kept.cli.output import counted, echo, show_json, show_table, size, table_cells, write
from kept.cli.shell import Seconds, WholeNumber, examples, internal_option, json_option
from kept.client.admin.cluster import describe_cluster
from kept.client.admin.cluster_sample import sample_partitions
from kept.client.admin.group_survey import groups_and_offsets
from kept.client.bootstrap import Bootstrap
from kept.client.client import SILENT_MS, Client
from kept.storage.errors import KeptError
from kept.storage.printable import printable_line
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from rich.console import RenderableType

PARTITIONS_AT_ONCE: Final = 1_000
"""Of a refresh. A cluster that has more is asked about them in turn."""
GROUPS_AT_ONCE: Final = 50
METADATA_S: Final = 30.0
"""How old what is known of topics and their leaders may be: the answer about all is large."""
TIMEOUT_MS: Final = 10_000
ROWS: Final = 20
_NAME_WIDTH: Final = 16
"""What the first column of the live view keeps in a narrow terminal; others make room."""
VIEWS: Final = ("nodes", "topics", "groups")
SORTS: Final = {
    "rate": ("records_per_s", "records/s"),
    "size": ("size_bytes", "size"),
    "growth": ("growth_bytes_per_s", "growth/s"),
    "lag": ("lag", "lag"),
    "name": ("", ""),
}
"""An order, and what it goes by: the field of a row, and the column that shows it."""
_KEYS: Final = {"a": None, "n": "nodes", "t": "topics", "g": "groups"}


@dataclass(slots=True)
class Watch:
    """A cluster that is asked again and again. ``internal``: about internal topics, too."""

    client: Client
    internal: bool
    rates: ClusterRates = field(default_factory=ClusterRates)
    partitions: Rotation[TopicPartition] = field(
        default_factory=lambda: Rotation(PARTITIONS_AT_ONCE)
    )
    groups: Rotation[str] = field(default_factory=lambda: Rotation(GROUPS_AT_ONCE))
    metadata_s: float | None = None

    def refresh(self, *, whole: bool = False) -> None:
        """Ask about the next partitions and groups; about all of them if ``whole``."""
        client, rates = self.client, self.rates
        if self.metadata_s is None or time.monotonic() - self.metadata_s >= METADATA_S:
            topics = client.metadata().topics
            self.metadata_s = time.monotonic()
            rates.set_topics({n: t for n, t in topics.items() if self.internal or not t.internal})
        rates.cluster = client.run(describe_cluster())
        led = rates.partitions(led=True)
        for _ in range(self.partitions.turns(len(led)) if whole else 1):
            chosen = self.partitions.next(led)
            sample = client.run(sample_partitions(client.view, chosen, SILENT_MS))
            rates.add_partitions(sample, time.monotonic())
        listings = client.list_groups([])
        rates.set_groups(
            [each for each in listings if self.internal or not is_internal_group(each.group)]
        )
        names = sorted(rates.listings)
        for _ in range(self.groups.turns(len(names)) if whole else 1):
            some = [rates.listings[name] for name in self.groups.next(names)]
            described, committed = client.run(groups_and_offsets(some, SILENT_MS))
            rates.add_groups(described, committed, time.monotonic())

    def age_s(self, interval_s: float) -> float | None:
        """How old rates may be, where not all is asked about each time."""
        turns = max(
            self.partitions.turns(len(self.rates.partitions(led=True))),
            self.groups.turns(len(self.rates.listings)),
        )
        return turns * interval_s if turns > 1 else None


@click.command(
    epilog=examples(
        "kept top",
        "kept top topics --sort size",
        "kept top groups --sort lag --once",
        "kept top --json | jq '.topics[] | select(.records_per_s > 1000)'",
    )
)
@click.argument("view", type=click.Choice(VIEWS), required=False)
@click.option(
    "--sort",
    type=click.Choice(list(SORTS)),
    default="rate",
    show_default=True,
    help="Order, the largest first.",
)
@click.option(
    "--interval",
    type=Seconds(0.5, 3600),
    default=2,
    show_default=True,
    metavar="SECONDS",
    help="Time between two refreshes, 0.5 to 3600.",
)
@click.option(
    "--limit",
    type=WholeNumber(0),
    metavar="ROWS",
    help=f"Rows of each table; 0 is all.  [default: what fits; with --once {ROWS}; JSON: all]",
)
@click.option("--once", is_flag=True, help="Print it once, with the rates of one interval.")
@internal_option("Also show internal topics and groups, and count them for nodes.")
@json_option
@bootstrap_option
def top(
    *,
    view: str | None,
    sort: str,
    interval: float,
    limit: int | None,
    once: bool,
    internal: bool,
    as_json: bool,
    bootstrap: Bootstrap,
) -> None:
    """Show nodes, topics and groups with what moves in them, every few seconds.

    RECORDS/S is how fast the ends of logs move; of a group, how fast its committed offsets do.
    GROWTH is how fast the size on the leaders' disks changes. Keys: n, t and g show nodes, topics
    or groups only, a shows all of them, s changes the order, q quits. Without a terminal it prints
    once.
    """
    client = Client(
        bootstrap.servers, "kept-top", timeout_ms=TIMEOUT_MS, security=bootstrap.security
    )
    with client:
        watch = Watch(client, internal)
        if not (once or as_json) and sys.stdout.isatty():
            with contextlib.suppress(KeyboardInterrupt):
                _live(watch, Settings(view, sort, interval, limit))
            return
        watch.refresh(whole=True)
        time.sleep(interval)
        watch.refresh(whole=True)
    views = VIEWS if view is None else (view,)
    most = limit if limit is not None else 0 if as_json else ROWS
    tables = {name: _sorted(watch.rates, name, sort) for name in views}
    if as_json:
        show_json({name: rows[: most or None] for name, rows in tables.items()})
        return
    for number, (name, rows) in enumerate(tables.items()):
        write("\n" if number else "")
        shown = rows[: most or None]
        show_table(*_table(name, shown))
        if len(shown) < len(rows):
            echo(f"and {len(rows) - len(shown)} more {name}: --limit 0 shows all")


def _sorted(rates: ClusterRates, view: str, sort: str) -> list[Row]:
    rows = {"nodes": rates.node_rows, "topics": rates.topic_rows, "groups": rates.group_rows}
    return sorted_rows(rows[view](), SORTS[sort][0], view.removesuffix("s"))


def _table(view: str, rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Columns and rows for people."""
    moved = ("records/s", "size", "growth/s")
    if view == "nodes":
        return ("node", "state", "role", "leaders", "replicas", *moved), [
            (
                row["node"],
                row["state"],
                "controller" if row["controller"] else "broker",
                row["leaders"],
                row["replicas"],
                *_moved(row),
            )
            for row in rows
        ]
    if view == "topics":
        return ("topic", "partitions", "under-replicated", "offline", *moved), [
            (
                row["topic"],
                row["partitions"],
                row["under_replicated"],
                row["offline"],
                *_moved(row),
            )
            for row in rows
        ]
    return ("group", "state", "members", "records/s", "lag", "unknown"), [
        (
            row["group"],
            row["state"],
            row["members"],
            _rate(row["records_per_s"]),
            row["lag"],
            row["partitions_unknown"],
        )
        for row in rows
    ]


def _moved(row: Row) -> tuple[Any, ...]:
    growth = row["growth_bytes_per_s"]
    sign = "-" if growth is not None and growth < 0 else ""
    grows = None if growth is None else f"{sign}{size(round(abs(growth)))}"
    return _rate(row["records_per_s"]), size(row["size_bytes"]), grows


def _rate(rate: float | None) -> float | None:
    """Whole where that is exact enough."""
    if rate is None:
        return None
    return round(rate) if rate == round(rate) or abs(rate) >= 10 else rate


# The live view.


@dataclass(slots=True)
class Settings:
    """What the screen shows; ``view`` None: all, ``limit`` None: what fits."""

    view: str | None
    sort: str
    interval_s: float
    limit: int | None

    @property
    def views(self) -> tuple[str, ...]:
        """The tables."""
        return VIEWS if self.view is None else (self.view,)

    def press(self, key: str) -> None:
        """Change what a key stands for."""
        if key == "s":
            orders = list(SORTS)
            self.sort = orders[(orders.index(self.sort) + 1) % len(orders)]
        self.view = _KEYS.get(key, self.view)

    def rows(self, height: int, nodes: int) -> int:
        """Rows of each table: nodes get what they need, up to a third of the screen."""
        if self.limit is not None:
            return self.limit
        left = height - 4 - 3 * len(self.views)
        if self.view is not None:
            return max(1, left)
        return max(1, (left - min(nodes, left // 3)) // 2)


def _live(watch: Watch, settings: Settings) -> None:
    """Until ``q`` or Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    error = ""
    with _keys() as wait_for_key, Live(console=console, screen=True, auto_refresh=False) as live:
        next_s = time.monotonic()
        while True:
            if time.monotonic() >= next_s:
                try:
                    watch.refresh()
                    error = ""
                except KeptError as problem:
                    error = " ".join(str(problem).split())
                next_s = time.monotonic() + settings.interval_s
            live.update(_screen(watch, settings, *console.size, error), refresh=True)
            key = wait_for_key(max(0.0, next_s - time.monotonic()))
            if key == "q":
                return
            settings.press(key)


def _screen(
    watch: Watch, settings: Settings, width: int, height: int, error: str
) -> RenderableType:
    """The whole screen, of ``width`` characters and ``height`` lines."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rates = watch.rates
    nodes = [] if rates.cluster is None else rates.cluster.members
    cluster = "" if rates.cluster is None else f"  cluster {rates.cluster.cluster_id}"
    counts = (
        counted(len(nodes), "node"),
        counted(len(rates.topics), "topic"),
        counted(len(rates.partitions()), "partition"),
        counted(len(rates.listings), "group"),
    )
    keys = f"by {settings.sort}  (n t g a: view, s: order, q: end)"
    head = f"{time.strftime('%H:%M:%S')}  {', '.join(counts)}{cluster}"
    if age := watch.age_s(settings.interval_s):
        keys += f"  rates are up to {age:.0f} s old"
    lines = [(head, ""), (keys, "")] + ([(error, "bold red")] if error else [])
    parts: list[RenderableType] = [
        Text(printable_line(line), style=style, overflow="ellipsis", no_wrap=True)
        for line, style in lines
    ]
    most = settings.rows(height, len(nodes))
    for name in settings.views:
        rows = _sorted(rates, name, settings.sort)
        columns, cells = _table(name, rows[: most or None])
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
        shown, texts, name_width = _that_fit(columns, cells, width, settings.sort)
        for number, column in enumerate(shown):
            right = number > 0 and column not in ("state", "role")
            table.add_column(
                Text(column.upper(), style="bold"),
                justify="right" if right else "left",
                overflow="ellipsis",
                no_wrap=True,
                width=None if number else name_width,
            )
        for row in texts:
            table.add_row(*map(Text, row))
        more = len(rows) - len(cells)
        parts += [Text(f"\n{name}, and {more} more" if more else f"\n{name}", style="dim"), table]
    return Group(*parts)


def _that_fit(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int, sorted_by: str
) -> tuple[list[str], list[list[str]], int]:
    """The columns that there is room for, from the left, but one that rows are sorted by first; the
    cells of each row in them; and the width of the first one, a name, which may be cut.
    """
    cells = [table_cells(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    left, shown = width - min(widths[0], _NAME_WIDTH), [0]
    if (order := SORTS[sorted_by][1]) in columns:
        number = columns.index(order)
        left, shown = left - 2 - widths[number], [0, number]
    for number, each in enumerate(widths):
        if number in shown:
            continue
        left -= 2 + each
        if left < 0:
            break
        shown.append(number)
    shown.sort()
    name_width = max(1, min(widths[0], width - sum(2 + widths[number] for number in shown[1:])))
    return [columns[n] for n in shown], [[row[n] for n in shown] for row in cells], name_width


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key and returns it; nothing where there is no
    keyboard.
    """
    if not sys.stdin.isatty():

        def pause(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield pause
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace") if ready else ""

    tty.setcbreak(sys.stdin)
    try:
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
