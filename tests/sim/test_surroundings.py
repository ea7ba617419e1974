"""No module that a history runs gets time, randomness, files, sockets, threads or processes from
anything but its Runtime, its loop, its disk, and what the simulator replaces by name.

The modules are read, not run: what no history happens to call is looked at, too. A name that is in
no table here is refused, so that a new one is decided on: replaced in ``surroundings.py``, taken
from the Runtime, or listed here with why it is harmless.
"""

from __future__ import annotations

import ast
import os
import random
import re
import secrets
import time
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from tests.sim.loop import SimLoop
from tests.sim.process import Process
from tests.sim.surroundings import EPOCH_S, REPLACED, UNSIMULATED, simulated
from tests.sim.world import Violation

ROOT: Final = Path(__file__).resolve().parents[2]
ROOMS: Final = ("storage", "compaction", "replication", "cluster", "client", "node")
PURE: Final = frozenset(
    {
        "__future__",
        "abc",
        "array",
        "base64",
        "binascii",
        "bisect",
        "collections",
        "collections.abc",
        "contextlib",
        "dataclasses",
        "difflib",
        "enum",
        "errno",
        "functools",
        "hashlib",
        "heapq",
        "hmac",
        "inspect",
        "ipaddress",
        "itertools",
        "json",
        "logging",  # lines go to node/runtime/logging.py
        "math",
        "operator",
        "re",
        "shlex",
        "struct",
        "textwrap",
        "traceback",  # reads sources, the same in every history
        "types",
        "typing",
        "urllib.parse",
        "warnings",
        "weakref",
        "zlib",
    }
)
"""Modules of Python's that reach nothing outside. All others are watched: what is taken of one has
to be in a table here."""
PACKAGES: Final = frozenset(
    {"kept", "cramjam", "crc32c", "google", "kio", "lz4", "msgspec", "pyroaring", "zstandard"}
)
"""The same of others, with all that is in them; and of our own, which are read one by one."""
INNER: Final = frozenset({"os.path", "concurrent.futures"})
"""Modules that are there as their package is imported, or as an attribute of it."""
ROUND_THE_LOOP: Final = frozenset(
    f"asyncio.{name}"
    for name in (
        "run",
        "Runner",
        "new_event_loop",
        "subprocess",
        "create_subprocess_exec",
        "create_subprocess_shell",
        "open_unix_connection",
        "start_unix_server",
    )
)
SEEDED: Final = frozenset({"random.uniform", "random.shuffle"})
"""Methods of the generator of module ``random``, which begins with the seed."""
DERIVED: Final = frozenset({"uuid.uuid4", "secrets.token_bytes"})
"""Made of what is replaced, at each call."""
HARMLESS: Final = frozenset(
    {
        "time.strftime",
        "time.gmtime",  # of a time that is given
        "uuid.UUID",
        "datetime.datetime",
        "datetime.timedelta",
        "datetime.UTC",  # but for what has no argument
        "os.environ",
        "os.path.dirname",  # of its argument alone, unlike what asks a disk
        "sys.byteorder",
        "sys.getsizeof",
        "threading.Lock",
        "threading.local",  # one thread holds them
        "concurrent.futures.ThreadPoolExecutor",  # its functions run on the loop
        "mmap.mmap",
        "mmap.MAP_PRIVATE",
        "mmap.MAP_ANONYMOUS",
        "io.BytesIO",  # memory
        "resource.RLIMIT_NOFILE",
        "resource.RLIM_INFINITY",
        "ssl.MemoryBIO",  # two ends in one process
        "ssl.SSLWantReadError",
        "ssl.SSLContext",
        "ssl.TLSVersion",
        "ssl.Purpose",
        "ssl.SSLError",  # sockets do the rest
        "ssl.SSLCertVerificationError",
        "ssl.SSLEOFError",
    }
)
CONSTANTS: Final = re.compile(r"(socket|os|select|ssl)\.[A-Z][A-Z0-9_]*")
NOW: Final = {"time.gmtime": 1, "time.localtime": 1, "time.ctime": 1, "time.strftime": 2}
"""With fewer arguments they are of the time of day."""
CLOCKS_OF_DATES: Final = frozenset({"now", "utcnow", "today"})

OUTSIDE: Final = {
    "node/process.py": "signals and the environment, before there is a node",
    "node/runtime/huge_pages.py": "the memory of a process, which node/process.py asks for",
    "node/runtime/service_manager.py": "systemd's socket",
    "node/runtime/subprocess.py": "worker processes: tests/sim/passes.py runs what they do",
    "node/metadata/preflight.py": "kept serve --check",
    "node/config/sources.py": "files of settings: a history has none",
    "node/config/bootstrap_scram.py": "users of a file: a history has none",
    "node/config/local_certificates.py": "kept local",
    "node/config/local_security.py": "kept local",
    "node/proto/build.py": "makes modules of .proto files",
    "node/grpc/": "gRPC's core owns its sockets and threads",
    "node/http/": "HTTP is in no history",
    "node/metrics/": "HTTP asks for them",
    "node/kafka_import/": "adoption is in no history",
    "compaction/cleaner/worker.py": "a process of its own: tests/sim/passes.py runs what it does",
    "client/client.py": "the client with threads",
    "client/sockets.py": "the client with threads",
    "client/consume/": "the client with threads",
    "client/admin/": "the client with threads",
    "client/connect.py": "HTTP is in no history, nor are logins by tokens",
    "client/json_api.py": "HTTP is in no history",
    "client/bootstrap.py": "its properties",
    "client/security/access_tokens.py": "logins by tokens are in no history",
    "node/security/oauth/": "logins by tokens are in no history",
    "client/security/pem.py": "TLS is in no history",
    "client/security/config_providers.py": "its properties",
    "client/security/properties.py": "its properties",
    "storage/disk.py": "the disk itself, which ProcessDisk replaces",
}
"""What no history runs, by file or folder, and why."""
NO_DESCRIPTOR: Final = "a simulated transport lends no socket"
ABSOLUTE: Final = "directories of a history are absolute: the one of the process is not asked for"
LACKED: Final = "a constant that a system may lack"
STRATEGY: Final = "a name that is no strategy of ours: no topic of a history has one"
WORKER: Final = "a worker process: tests/sim/passes.py runs what it does"
THREAD: Final = "of a thread as it starts: the loop of a history starts none"
SEAMS: Final = {
    ("node/runtime/runtime.py", "socket.socket"): "SimRuntime.stream_socket",
    ("node/runtime/clock.py", "time"): LACKED,
    ("node/runtime/malloc.py", "ctypes.CDLL"): "how memory is given back: no history depends on it",
    ("node/internode/hello.py", "socket"): LACKED,
    ("client/security/tls.py", "ssl"): LACKED,
    ("node/config/node_config.py", "os.path.abspath"): ABSOLUTE,
    ("node/kafka/handlers/cluster/describe_log_dirs.py", "os.path.abspath"): ABSOLUTE,
    ("node/admin/views/log_directories.py", "os.path.abspath"): ABSOLUTE,
    ("compaction/strategy.py", "importlib.metadata.entry_points"): STRATEGY,
    (
        "node/kafka/handlers/topics/config_schema.py",
        "importlib.metadata.entry_points",
    ): STRATEGY,
    ("compaction/manifest/follow_worker.py", "sys.executable"): WORKER,
    ("compaction/manifest/follow_worker.py", "sys.stdout"): WORKER,
    ("compaction/manifest/follow_worker.py", "sys.exit"): WORKER,
    ("node/compaction/dry_run.py", "sys.executable"): WORKER,
    ("node/compaction/dry_run_worker.py", "sys.exit"): WORKER,
    ("node/compaction/cleaner.py", "importlib.import_module"): "a module of ours",
    ("node/kafka/api.py", "importlib.import_module"): "modules of ours",
    ("node/config/sasl.py", "importlib.util.find_spec"): "logins by tokens are in no history",
    ("node/runtime/logging.py", "sys.stderr"): "a history keeps what Logger._write is given",
    ("node/security/password_checks.py", "threading.get_native_id"): THREAD,
    ("node/security/password_checks.py", "os.getpriority"): THREAD,
    ("node/security/password_checks.py", "os.setpriority"): THREAD,
    ("node/security/audit.py", "sys.stderr"): "no log of audits is on in a history",
    ("node/kafka/listener.py", "socket.socketpair"): "HTTP and gRPC speak to their own node",
    ("node/kafka/accept_throttle.py", "select.poll"): "a simulated listener has no descriptor",
    ("node/kafka/response_writer.py", "os.write"): NO_DESCRIPTOR,
    ("node/kafka/response_writer.py", "os.writev"): NO_DESCRIPTOR,
    ("node/kafka/response_writer.py", "os.dup"): NO_DESCRIPTOR,
    ("node/kafka/response_writer.py", "socket.socket"): NO_DESCRIPTOR,
    ("client/node_connection.py", "os.dup"): NO_DESCRIPTOR,
    ("client/node_connection.py", "socket.socket"): NO_DESCRIPTOR,
    ("storage/errors.py", "os.geteuid"): "the text of an error that no simulated disk has",
    (
        "node/kafka/handlers/cluster/describe_log_dirs.py",
        "os.statvfs",
    ): "no client of a history asks",
    ("node/admin/views/log_directories.py", "os.statvfs"): "HTTP asks",
    ("node/runtime/fd_quota.py", "resource.setrlimit"): "node/process.py calls it",
    ("node/runtime/fd_quota.py", "os.sysconf"): "node/process.py calls it",
    ("node/security/stored_credentials.py", "secrets.token_bytes"): "no password fits it anyhow",
}
"""(module, name): why it may use that."""


IMPORTED: Final = re.compile(r"^\s*(?:from|import) ([\w.]+)", re.M)
OPENS: Final = re.compile(r"(?<![\w.])open\(")


@cache
def sources() -> dict[str, str]:
    """Name -> text of every module that is not generated."""
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for path in paths
        if not path.name.endswith("_pb2.py")
    }


def is_pure(module: str) -> bool:
    """Whether nothing of it need be looked at."""
    return module in PURE or module.partition(".")[0] in PACKAGES


def modules() -> Iterator[tuple[str, str]]:
    """(name, text) of those that a history may run, and that import something that is watched."""
    for name, text in sources().items():
        watched = OPENS.search(text) or not all(map(is_pure, IMPORTED.findall(text)))
        if watched and not name.startswith(tuple(OUTSIDE)):
            yield name, text


class Uses(ast.NodeVisitor):
    """What a module takes of the watched modules: (line, name, whether as it is imported)."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str, bool]] = []
        self._modules: set[str] = {*PURE, *INNER, "asyncio", "builtins"}
        self._names: dict[str, str] = {"open": "builtins.open"}
        """What a name is bound to, with dots."""
        self._depth = 0

    def _note(self, node: ast.stmt | ast.expr, name: str) -> None:
        self.found.append((node.lineno, name, self._depth == 0))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._modules.add(alias.name)
            top = alias.name.partition(".")[0]
            self._names[alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "kept" if node.level else node.module or ""
        self._modules.add(module)
        for alias in node.names:
            self._names[alias.asname or alias.name] = f"{module}.{alias.name}"
            if alias.name == "*" and not is_pure(module):
                self._note(node, f"{module}.*")

    def visit_If(self, node: ast.If) -> None:
        typing = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in node.orelse if typing else [node.test, *node.body, *node.orelse]:
            self.visit(child)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        """Defaults are evaluated where it is defined; annotations never are."""
        outer = [*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)]
        body: list[Any] = [node.body]
        if not isinstance(node, ast.Lambda):
            outer += node.decorator_list
            body = list(node.body)
        for child in outer:
            self.visit(child)
        self._depth += 1
        for child in body:
            self.visit(child)
        self._depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_function

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._used(node.func)
        if name is not None and len(node.args) < NOW.get(name, 0):
            self._note(node, f"{name}()")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted, name = self._dotted(node), self._used(node)
        if name is not None:
            self._note(node, name)
        if name in {"datetime.datetime", "datetime.date"} and node.attr in CLOCKS_OF_DATES:
            self._note(node, f"{name}.{node.attr}")
        if dotted is None:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        name = self._used(node)
        if name is not None and isinstance(node.ctx, ast.Load):
            self._note(node, name)

    def _dotted(self, node: ast.AST) -> str | None:
        """A chain of attributes with what its first name is bound to in its place."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            inner = self._dotted(node.value)
            return None if inner is None else f"{inner}.{node.attr}"
        return None

    def _used(self, node: ast.AST) -> str | None:
        """A watched module and what is taken of it, which may be all of it; None: nothing is."""
        dotted = self._dotted(node)
        if dotted is None:
            return None
        parts = dotted.split(".")
        lengths = range(len(parts), 0, -1)
        known = next((n for n in lengths if ".".join(parts[:n]) in self._modules), len(parts))
        return None if is_pure(".".join(parts[:known])) else ".".join(parts[: known + 1])


@cache
def uses_of(text: str) -> list[tuple[int, str, bool]]:
    """See :class:`Uses`."""
    uses = Uses()
    uses.visit(ast.parse(text))
    return uses.found


def judged(name: str, text: str) -> list[str]:
    """What a module may not use."""
    wrong = []
    for line, used, imported in uses_of(text):
        if (name, used) in SEAMS or used in HARMLESS | SEEDED or CONSTANTS.fullmatch(used):
            continue
        if re.fullmatch(r"asyncio\.\w+", used) and used not in ROUND_THE_LOOP:
            continue
        if used not in REPLACED.keys() | DERIVED:
            wrong.append(f"{name}:{line}: {used} is not simulated")
        elif imported:
            wrong.append(f"{name}:{line}: {used} is taken as the module is imported")
    return wrong


def test_modules_use_nothing_that_is_not_simulated() -> None:
    wrong = [line for name, text in modules() for line in judged(name, text)]
    assert not wrong, "\n".join(wrong)


def test_kernels_call_no_clock_and_draw_nothing() -> None:
    outside = re.compile(
        r"\bc?import (time|random|os)\b|(posix|libc)\.(time|unistd|fcntl)|cimport .*\brand\b|"
        r"\b(clock_gettime|gettimeofday|getrandom|arc4random|rdtsc)\b"
    )
    wrong = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for room in ROOMS
        for kind in ("*.pyx", "*.pxd", "*.h")
        for path in (ROOT / room).rglob(kind)
        for found in outside.finditer(path.read_text())
    ]
    assert not wrong, wrong


def test_every_exception_is_needed() -> None:
    """What is listed as outside uses what is not simulated; all else is used by what is inside."""
    used = {(name, one) for name, text in modules() for _, one, _ in uses_of(text)}
    names = {one for _, one in used}
    inside = [text for name, text in sources().items() if not name.startswith(tuple(OUTSIDE))]
    imported = {module for text in inside for module in IMPORTED.findall(text)}
    needless = {
        "SEAMS": SEAMS.keys() - used,
        "HARMLESS": HARMLESS - names,
        "SEEDED": SEEDED - names,
        "DERIVED": DERIVED - names,
        "PURE": PURE - imported,
        "PACKAGES": PACKAGES - {module.partition(".")[0] for module in imported},
        "OUTSIDE": {
            outside
            for outside in OUTSIDE
            if not any(
                judged(name, text) for name, text in sources().items() if name.startswith(outside)
            )
        },
    }
    assert not any(needless.values()), {table: left for table, left in needless.items() if left}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import time\ndef f(): return time.monotonic_ns()", "time.monotonic_ns"),
        ("import time as t\ndef f(): return t.time_ns()", "time.time_ns"),
        ("from time import thread_time\ndef f(): return thread_time()", "time.thread_time"),
        ("import time\ndef f(clock=time.monotonic): return clock()", "as the module is imported"),
        ("import time\nCLOCK = time.perf_counter", "as the module is imported"),
        ("import time\nclass A:\n    clock = time.time", "as the module is imported"),
        ("import time\ndef f(): return time.gmtime()", "time.gmtime()"),
        ("import time\ndef f(name): return getattr(time, name)()", ": time is not"),
        ("from datetime import datetime\ndef f(): return datetime.now()", "datetime.datetime.now"),
        ("import random\ndef f(): return random.Random()", "random.Random"),
        ("import os\ndef f(): return os.getrandom(4)", "os.getrandom"),
        ("import uuid\ndef f(): return uuid.uuid1()", "uuid.uuid1"),
        ("import uuid\nID = uuid.uuid4()", "as the module is imported"),
        ("import socket\ndef f(): return socket.socket()", "socket.socket"),
        ("import threading\ndef f(): threading.Thread(target=f).start()", "threading.Thread"),
        ("import asyncio\ndef f(g): asyncio.run(g())", "asyncio.run"),
        ("from pathlib import Path\ndef f(): return Path('x').read_text()", "pathlib.Path"),
        ("def f(): return open('x')", "builtins.open"),
        ("import os\ndef f(p): return os.path.exists(p)", "os.path.exists"),
        ("from os import path\ndef f(p): return path.getmtime(p)", "os.path.getmtime"),
        ("from os.path import realpath\ndef f(p): return realpath(p)", "os.path.realpath"),
        ("import os.path as p\ndef f(): return p.abspath('x')", "os.path.abspath"),
        (
            "import concurrent.futures\ndef f(): return concurrent.futures.ProcessPoolExecutor()",
            "concurrent.futures.ProcessPoolExecutor",
        ),
        (
            "from concurrent import futures\ndef f(): return futures.ProcessPoolExecutor()",
            "concurrent.futures.ProcessPoolExecutor",
        ),
        ("import concurrent as c\ndef f(): return c.futures.wait([])", "concurrent.futures.wait"),
        ("import http.client\ndef f(h): return http.client.HTTPConnection(h)", "http.client.HTTPC"),
        ("from http import client\ndef f(h): return client.HTTPConnection(h)", "http.client"),
        ("from urllib.request import urlopen\ndef f(u): return urlopen(u)", "urllib.request.urlo"),
        ("import urllib.parse\ndef f(u): return urllib.request.urlopen(u)", "urllib.request"),
        ("import glob\ndef f(): return glob.glob('*')", "glob.glob"),
        ("import ssl\ndef f(): return ssl.RAND_bytes(8)", "ssl.RAND_bytes"),
        ("import sys\ndef f(): sys.stdout.write('x')", "sys.stdout"),
        ("import sqlite3\ndef f(): return sqlite3.connect('x')", "sqlite3.connect"),
        (
            "import asyncio.subprocess as s\ndef f(): return s.create_subprocess_exec('x')",
            "asyncio.subprocess.create_subprocess_exec",
        ),
        ("from time import *", "time.*"),
    ],
)
def test_what_is_not_simulated_is_named(text: str, said: str) -> None:
    (wrong,) = judged("node/new.py", text)
    assert wrong.startswith("node/new.py:") and said in wrong


@pytest.mark.parametrize(
    "text",
    [
        "import time\ndef f(): return time.monotonic()",
        "from time import perf_counter\ndef f(): return perf_counter()",
        "import socket\ndef f(sock: socket.socket) -> int: return socket.AF_INET",
        "import asyncio\nasync def f(): await asyncio.sleep(1)",
        "import time\ndef f(now): return time.gmtime(now)",
        "class A:\n    def open(self): ...\ndef f(a): a.open()",
        "import os\ndef f(path): return os.path.dirname(path)",
        "import ssl\ndef f(a): return a == ssl.CERT_NONE",
        "import urllib.parse\ndef f(path): return urllib.parse.quote(path)",
        "from kept.storage.disk import open_all\ndef f(): open_all()",
        "from concurrent.futures import ThreadPoolExecutor\ndef f(): return ThreadPoolExecutor(1)",
    ],
)
def test_what_is_simulated_is_allowed(text: str) -> None:
    assert not judged("node/new.py", text)


def draws(seed: int) -> list[object]:
    """What every function that is replaced, and what is made of it, gives in a history."""
    loop = SimLoop(seed)
    try:
        with simulated(loop, seed, lambda *_: None):
            return [
                time.time(),
                time.monotonic(),
                time.perf_counter(),
                os.urandom(8),
                uuid.uuid4(),
                secrets.token_bytes(8),
                random.SystemRandom().random(),
                random.uniform(0, 1),
                time.clock_gettime(time.CLOCK_MONOTONIC),
            ]
    finally:
        loop.close()


def test_what_is_replaced_follows_from_the_seed_and_is_put_back() -> None:
    real = {name: _found(name) for name in (*REPLACED, *UNSIMULATED)}
    assert draws(1) == draws(1) and draws(1)[3:8] != draws(2)[3:8]
    assert draws(1)[0] == EPOCH_S
    assert {name: _found(name) for name in real} == real


def _found(name: str) -> Any:
    from pkgutil import resolve_name

    return resolve_name(name.replace(".", ":", 1))


def test_a_process_that_reaches_the_machine_ends_its_history() -> None:
    loop = SimLoop(1)
    process = Process("n0.1", "10.0.0.1")
    try:
        with simulated(loop, 1, lambda *_: None):
            assert time.time_ns() > 0, "the test's own code may"
            with pytest.raises(Violation, match=r"\[unsimulated\] n0.1 calls time.time_ns"):
                process.context.run(time.time_ns)
            assert [name for _, name, _ in loop.escaped] == ["time.time_ns"]
            process.alive = False
            process.context.run(time.time_ns)
    finally:
        loop.close()
