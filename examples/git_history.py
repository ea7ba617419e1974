"""The first-parent history of a git repository as changes of files, by git's own commands.

Part of the example git_changelog.py, which streams these changes into a topic.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

SUBMODULE = "160000"
GONE = "000000"
RECORD_OVERHEAD = 4096  # more than headers, key and framing of one record take
SEGMENTS = 12  # so many closed segments the whole history would fill
SMALLEST_SEGMENT = 64 * 1024
LARGEST_SEGMENT = 64 * 1024 * 1024
LARGEST_BLOB = 512 * 1024 * 1024


class Change(NamedTuple):
    """A file as a commit left it; blob is None when the commit deleted it."""

    commit: str
    path: bytes
    mode: str
    blob: str | None


class Git:
    """A repository, by git's own commands."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.environ = {**os.environ, "GIT_NO_REPLACE_OBJECTS": "1", "LC_ALL": "C"}
        self.head = "HEAD"
        self.skipped_submodules: set[bytes] = set()

    def command(self, *arguments: str) -> list[str]:
        return ["git", "-C", self.path, *arguments]

    def run(self, *arguments: str) -> bytes | None:
        """What the command prints, None when it fails."""
        command = self.command(*arguments)
        done = subprocess.run(command, capture_output=True, env=self.environ, check=False)
        return done.stdout if done.returncode == 0 else None

    def must(self, *arguments: str) -> bytes:
        """What the command prints; the end when it fails."""
        printed = self.run(*arguments)
        if printed is None:
            give_up(f"git {' '.join(arguments)} failed in {self.path}", 2)
        return printed

    def changes(self) -> Iterator[Change]:
        """Every change on the first-parent history of HEAD, oldest first."""
        arguments = ("log", "--first-parent", "-m", "--root", "--reverse", "--raw", "-z")
        arguments += (
            "--no-renames",
            "--no-abbrev",
            "--no-show-signature",
            "--format=%x01%H",
            self.head,
        )
        process = subprocess.Popen(
            self.command(*arguments), stdout=subprocess.PIPE, env=self.environ
        )
        assert process.stdout is not None
        tokens = split_at_nul(process.stdout)
        commit = ""
        for token in tokens:
            line = token.lstrip(b"\n")
            if line.startswith(b"\x01"):
                commit = line[1:].decode()
            elif line.startswith(b":"):
                old_mode, new_mode, _, blob, _ = line[1:].decode().split(" ")
                change = self.change(commit, next(tokens), old_mode, new_mode, blob)
                if change is not None:
                    yield change
        if process.wait():
            give_up("git log failed", 2)

    def change(
        self, commit: str, path: bytes, old_mode: str, new_mode: str, blob: str
    ) -> Change | None:
        """The change as it concerns content: a submodule is nothing."""
        if SUBMODULE in (old_mode, new_mode):
            self.skipped_submodules.add(path)
        was_file = old_mode not in (GONE, SUBMODULE)
        if new_mode not in (GONE, SUBMODULE):
            return Change(commit, path, new_mode, blob)
        return Change(commit, path, GONE, None) if was_file else None

    def tree(self) -> dict[bytes, tuple[str, str]]:
        """Path to (mode, blob id) of every file of HEAD."""
        files = {}
        for entry in self.must("ls-tree", "-r", "-z", "--full-tree", self.head).split(b"\0"):
            if entry:
                about, _, path = entry.partition(b"\t")
                mode, _, blob = about.decode().split(" ")
                if mode != SUBMODULE:
                    files[path] = (mode, blob)
        return files


def split_at_nul(source: object, chunk_bytes: int = 1 << 16) -> Iterator[bytes]:
    rest = b""
    while chunk := source.read(chunk_bytes):  # type: ignore[attr-defined]
        *whole, rest = (rest + chunk).split(b"\0")
        yield from whole
    if rest.strip():
        yield rest


class Blobs:
    """Contents and sizes of blobs, from one `git cat-file` process each."""

    def __init__(self, git: Git) -> None:
        self.processes = {
            option: subprocess.Popen(
                git.command("cat-file", option),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=git.environ,
            )
            for option in ("--batch", "--batch-check")
        }

    def ask(self, option: str, blob: str) -> tuple[subprocess.Popen[bytes], int]:
        process = self.processes[option]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(blob.encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline().split()
        if len(answer) != 3 or answer[1] != b"blob":
            give_up(f"blob {blob} is not in the repository (a partial clone?)", 2)
        return process, int(answer[2])

    def size(self, blob: str) -> int:
        return self.ask("--batch-check", blob)[1]

    def content(self, blob: str) -> bytes:
        process, size = self.ask("--batch", blob)
        assert process.stdout is not None
        content = process.stdout.read(size)
        process.stdout.read(1)
        return content

    def close(self) -> None:
        for process in self.processes.values():
            process.communicate()


class Plan(NamedTuple):
    """What the history holds, found out before streaming it, and the settings that follow."""

    commits: int
    changes: int
    tombstones: int
    content_bytes: int
    largest: int

    @property
    def max_message_bytes(self) -> int:
        return max(1_048_588, self.largest + RECORD_OVERHEAD)

    @property
    def segment_bytes(self) -> int:
        share = (self.content_bytes + 200 * self.changes) // SEGMENTS
        wanted = min(max(share, SMALLEST_SEGMENT), LARGEST_SEGMENT)
        return max(wanted, self.largest + RECORD_OVERHEAD)

    @property
    def batch_bytes(self) -> int:
        return min(self.segment_bytes // 4, 900_000)


def look_ahead(git: Git, blobs: Blobs) -> Plan:
    commits: set[str] = set()
    sizes: dict[str, int] = {}
    changes = tombstones = total = 0
    for change in git.changes():
        commits.add(change.commit)
        changes += 1
        if change.blob is None:
            tombstones += 1
        else:
            if change.blob not in sizes:
                sizes[change.blob] = blobs.size(change.blob)
            total += sizes[change.blob]
    return Plan(len(commits), changes, tombstones, total, max(sizes.values(), default=0))


def first_difference(
    table: dict[bytes, tuple[str, bytes]], tree: dict[bytes, tuple[str, str]], hash_name: str
) -> str | None:
    """Where the table and HEAD's tree differ, None where they do not."""
    for path in sorted({*table, *tree}):
        name = os.fsdecode(path)
        if path not in table:
            return f"{name} is in HEAD but not in the topic"
        if path not in tree:
            return f"{name} is in the topic but not in HEAD"
        (mode, content), (mode_there, blob) = table[path], tree[path]
        if mode != mode_there:
            return f"{name} has mode {mode} in the topic, {mode_there} in HEAD"
        found = hashlib.new(hash_name, b"blob %d\0" % len(content) + content).hexdigest()
        if found != blob:
            return f"{name} is blob {found} in the topic, {blob} in HEAD"
    return None


def describe(git: Git, plan: Plan) -> None:
    name = os.path.basename(os.path.abspath(git.path))
    head = git.must("rev-parse", "--short", git.head).decode().strip()
    print(
        f"{name} at {head}: {plan.commits} commits on the first-parent history, "
        f"{plan.changes} changes ({plan.tombstones} deletions), {mib(plan.content_bytes)}, "
        f"largest blob {mib(plan.largest)}"
    )
    if git.must("rev-parse", "--is-shallow-repository").strip() == b"true":
        print("this is a shallow clone: its history begins with the oldest commit that is here")
    if git.skipped_submodules:
        names = ", ".join(sorted(map(os.fsdecode, git.skipped_submodules)))
        print(f"submodules are left out: {names}")
    if plan.largest > LARGEST_BLOB:
        give_up(f"a blob of {mib(plan.largest)} is beyond this example ({mib(LARGEST_BLOB)})")


def mib(size: int) -> str:
    return f"{size / (1 << 20):,.2f} MiB"


def give_up(message: str, status: int = 1) -> NoReturn:
    print(f"git_changelog: {message}", file=sys.stderr)
    sys.exit(status)
