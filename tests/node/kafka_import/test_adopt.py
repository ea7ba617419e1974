"""``--adopt`` on directories as Apache Kafka 4.3.0 left them: what is refused, and how it ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from click.testing import CliRunner

from kept.cli.commands.serve import serve
from kept.cluster.metadata.metadata_files import open_metadata_files
from kept.cluster.metadata.snapshot import load_snapshot
from kept.node.coordinator.transactions.records import (
    TransactionMetadata,
    TransactionRecord,
    TransactionState,
)
from kept.node.kafka_import import adopt as adopt_module
from kept.node.kafka_import.adopt import adopt
from kept.node.kafka_import.directories import symbolic_links
from kept.storage import checkpoints, layout
from kept.storage.directory import LogDirectory, refuse_kafka
from kept.storage.disk import Disk, Lock
from kept.storage.errors import (
    ConfigurationError,
    DamagedData,
    DirectoryInUse,
    DirectoryRefused,
    KeptError,
)
from kept.storage.records import build_batch
from tests.node.kafka_import import fixtures

ANOTHER = UUID(int=99)


@pytest.fixture
def kafka(tmp_path: Path) -> Path:
    return fixtures.copy("n0", tmp_path / "data")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def tree(path: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_it_is_taken_over_once_and_kafkas_metadata_stay(kafka: Path) -> None:
    before = fixtures.hashes(kafka)
    config = fixtures.config(kafka)
    with pytest.raises(DirectoryRefused, match="kept serve --adopt takes it over"):
        refuse_kafka(Disk(), str(kafka))
    adopt(config, Disk())
    assert fixtures.hashes(kafka) == before
    refuse_kafka(Disk(), str(kafka))  # is kept's now
    metadata = tree(Path(config.metadata_log_dir))
    adopt(config, Disk())  # the same command at each start
    assert tree(Path(config.metadata_log_dir)) == metadata
    files = open_metadata_files(config.metadata_log_dir, Disk(), ANOTHER)
    assert files.wal.last_index == 132
    assert [voter.port for voter in files.image.voters] == [23092, 23192, 23292]
    assert files.identity.directory_id == files.image.voters[0].directory_id
    directory = LogDirectory.open(
        str(kafka),
        Disk(),
        cluster_id=files.image.cluster_id or "",
        node_id=0,
        new_directory_id=ANOTHER,
        now_ms=0,
    )
    assert directory.adopted
    assert directory.was_clean
    names = {found.directory_name for found in directory.scan()}
    assert layout.METADATA_LOG not in names
    assert "table-2" in names
    directory.close(clean=False)


def test_a_disk_that_was_added_later_is_no_reason_to_refuse(kafka: Path) -> None:
    """``--adopt`` may stay in the command: a directory of nobody's has nothing to be taken over."""
    config = fixtures.config(kafka)
    added = kafka.parent / "added"
    more = fixtures.config(
        kafka, log_dirs=f"{kafka},{added}", metadata_log_dir=config.metadata_log_dir
    )
    added.mkdir()
    before = tree(kafka.parent)
    with pytest.raises(DirectoryRefused, match=r"added: no meta\.properties there"):
        adopt(more, Disk())  # may be one of Kafka's whose disk is not mounted
    assert tree(kafka.parent) == before
    adopt(config, Disk())
    adopted = tree(kafka.parent)
    adopt(more, Disk())
    assert tree(kafka.parent) == adopted


def test_a_dry_run_changes_nothing(kafka: Path) -> None:
    before = tree(kafka.parent)
    adopt(fixtures.config(kafka), Disk(), dry=True)
    after = tree(kafka.parent)
    after.pop(str(kafka / ".lock"), None)
    assert after == before


def _unclean(kafka: Path) -> None:
    (kafka / layout.CLEAN_SHUTDOWN).unlink()


def _other_node(kafka: Path) -> None:
    edit(kafka / "meta.properties", "node.id=0", "node.id=7")


def _zookeeper(kafka: Path) -> None:
    edit(kafka / "meta.properties", "version=1", "version=0")


def _no_directory_id(kafka: Path) -> None:
    edit(kafka / "meta.properties", "directory.id=", "nothing=")


def _no_metadata(kafka: Path) -> None:
    shutil.rmtree(kafka / layout.METADATA_LOG)


def _no_quorum_state(kafka: Path) -> None:
    (kafka / layout.METADATA_LOG / "quorum-state").unlink()


def _a_log_is_gone(kafka: Path) -> None:
    shutil.rmtree(kafka / "table-2")


def _moving(kafka: Path) -> None:
    (kafka / f"plain-0.{'0' * 32}-future").mkdir()


def _old_batches(kafka: Path) -> None:
    (kafka / "plain-0" / f"{0:020d}.log").write_bytes(bytes(16) + b"\x01" + bytes(60))


def _damaged_snapshot(kafka: Path) -> None:
    (kafka / "plain-1" / f"{9:020d}.snapshot").write_bytes(b"\0\1")


def _unknown_transaction(kafka: Path) -> None:
    """Of status 7, which KIP-939 would write."""
    known = TransactionMetadata(5, 0, 60_000, TransactionState.ONGOING)
    key, value = TransactionRecord("bank", known).encode()
    assert value is not None
    at = 2 + 8 + 2 + 4
    changed = value[:at] + b"\7" + value[at + 1 :]
    data = build_batch([(1, key, value, ()), (2, key, changed, ())])
    (kafka / "__transaction_state-0" / f"{0:020d}.log").write_bytes(data)


def _another_directory(kafka: Path) -> None:
    text = (kafka / "meta.properties").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("directory.id")]
    (kafka / "meta.properties").write_text("\n".join([*lines, "directory.id=" + "A" * 22, ""]))


def _other_voters(kafka: Path) -> None:
    path = kafka / layout.METADATA_LOG / "quorum-state"
    state = json.loads(path.read_text())
    state["currentVoters"].append({"voterId": 3})
    path.write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_unclean, "was not stopped cleanly"),
        (_other_node, "belongs to node.id 7, and this is node 0"),
        (_zookeeper, "migrate to KRaft"),
        (_no_directory_id, "directory.id: '' is not an id"),
        (_no_metadata, "name Apache Kafka's metadata.log.dir with --kafka-metadata"),
        (_no_quorum_state, "this is no node of KRaft"),
        (_a_log_is_gone, r"table-2 \(topic id .*\) is not in log.dirs"),
        (_moving, "let Apache Kafka finish that"),
        (_old_batches, "holds batches of version 1"),
        (_damaged_snapshot, "2 bytes are no snapshot: start Apache Kafka once more"),
        (
            _unknown_transaction,
            "offset 1: a transaction of status 7; this node knows statuses 0 to 5",
        ),
        (_another_directory, "is not in log.dirs: name all that it had"),
        (_other_voters, r"controllers were the nodes \[0, 1, 2, 3\], .* names \[0, 1, 2\]"),
    ],
)
def test_what_is_not_taken_over_is_refused_and_left_as_it_was(
    kafka: Path, harm: Callable[[Path], None], said: str
) -> None:
    harm(kafka)
    before = tree(kafka.parent)
    with pytest.raises(KeptError, match=said):
        adopt(fixtures.config(kafka), Disk())
    after = tree(kafka.parent)
    after.pop(str(kafka / ".lock"), None)
    assert after == before


def test_a_running_kafka_holds_its_lock(kafka: Path) -> None:
    lock: Lock = Disk().lock(str(kafka / layout.LOCK))
    try:
        with pytest.raises(DirectoryInUse, match="is Apache Kafka still running"):
            adopt(fixtures.config(kafka), Disk())
    finally:
        lock.release()


def test_damage_in_the_metadata_log_names_the_place(kafka: Path) -> None:
    path = kafka / layout.METADATA_LOG / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData, match=r"__cluster_metadata-0/0+\.log: damaged at byte 9\d\d\d"):
        adopt(fixtures.config(kafka), Disk())


SASL = {
    "listeners": "CLIENTS://127.0.0.1:0",
    "listener_security_protocol_map": "CLIENTS:SASL_PLAINTEXT",
    "sasl_enabled_mechanisms": "SCRAM-SHA-256",
}
AUTHORIZER = {
    "authorizer_class_name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super_users": "User:admin",
}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "1 ACLs, and authorizer.class.name is not set.*1 SCRAM credentials, and no listener"),
        (SASL, "1 ACLs, and authorizer.class.name is not set"),
        (AUTHORIZER, "1 SCRAM credentials, and no listener asks for one"),
    ],
)
def test_what_kept_would_not_ask_for_is_refused_unless_that_is_meant(
    tmp_path: Path, settings: dict[str, str], reason: str
) -> None:
    kafka = fixtures.copy("one", tmp_path / "data")
    config = fixtures.config(kafka, alone=True, **settings)
    with pytest.raises(DirectoryRefused, match=rf"{reason}.*--ignore-security"):
        adopt(config, Disk())
    adopt(config, Disk(), ignore_security=True)
    image, _, _ = load_snapshot(Disk(), config.metadata_log_dir)
    assert (len(image.acls), len(image.credentials), len(image.quotas)) == (1, 1, 1)


@pytest.mark.parametrize(
    "name", ["t0-0", f"t0-1/{0:020d}.log", "meta.properties", "__cluster_metadata-0/quorum-state"]
)
def test_a_symbolic_link_is_refused_by_its_path(tmp_path: Path, name: str) -> None:
    kafka = fixtures.copy("one", tmp_path / "data")
    (kafka / name).rename(tmp_path / "elsewhere")
    (kafka / name).symlink_to(tmp_path / "elsewhere")
    before = fixtures.hashes(kafka)
    with pytest.raises(DirectoryRefused, match=rf"data/{name} is a symbolic link"):
        adopt(fixtures.config(kafka, alone=True), Disk(), ignore_security=True)
    assert fixtures.hashes(kafka) == before


def test_what_belongs_to_the_file_system_is_not_looked_into(tmp_path: Path) -> None:
    kafka = fixtures.copy("one", tmp_path / "data")
    (kafka / "lost+found").mkdir()
    (kafka / "lost+found" / "link").symlink_to(tmp_path)
    assert not [*symbolic_links(Disk(), str(kafka))]


def test_the_directory_itself_may_be_reached_by_a_link(tmp_path: Path) -> None:
    fixtures.copy("one", tmp_path / "disk7")
    (tmp_path / "data").symlink_to(tmp_path / "disk7")
    adopt(fixtures.config(tmp_path / "data", alone=True), Disk(), ignore_security=True)


def test_a_secured_node_goes_on_as_one(tmp_path: Path) -> None:
    kafka = fixtures.copy("one", tmp_path / "data")
    adopt(fixtures.config(kafka, alone=True, **SASL, **AUTHORIZER), Disk())


def test_topics_that_hold_what_is_not_served_are_named(
    kafka: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(adopt_module.NOT_SERVED, "plain", "a thing")
    adopt(fixtures.config(kafka), Disk(), dry=True)
    told = capsys.readouterr()
    assert "a thing; plain stays as a topic" in told.out + told.err
    assert "share groups" not in told.out + told.err


def test_a_lone_node_is_not_three(kafka: Path) -> None:
    with pytest.raises(DirectoryRefused, match=r"were the nodes \[0, 1, 2\], and .* names \[0\]"):
        adopt(fixtures.config(kafka, alone=True), Disk())


def test_an_empty_directory_is_not_begun_anew(tmp_path: Path) -> None:
    with pytest.raises(DirectoryRefused, match=r"set log\.dirs to what it was in Apache Kafka"):
        adopt(fixtures.config(tmp_path / "wrong"), Disk())


@pytest.mark.parametrize(("role", "node_id"), [("broker", 5), ("controller", 0)])
def test_nodes_of_one_role_are_told_the_other_way(kafka: Path, role: str, node_id: int) -> None:
    config = fixtures.config(kafka, node_id, process_roles=role)
    with pytest.raises(ConfigurationError, match=rf"roles is {role}\. .*kept consume TOPIC"):
        adopt(config, Disk())


def test_the_directory_of_a_controller_is_known(kafka: Path) -> None:
    """It leaves no mark of a clean stop: that is no reason to start Kafka again."""
    (kafka / layout.CLEAN_SHUTDOWN).unlink()
    for log in kafka.iterdir():
        if log.is_dir() and log.name != layout.METADATA_LOG:
            shutil.rmtree(log)
    with pytest.raises(DirectoryRefused, match=r"0 was a controller only\. .*kept consume TOPIC"):
        adopt(fixtures.config(kafka), Disk())


def test_options_of_adopt_need_it() -> None:
    done = CliRunner().invoke(serve, ["--ignore-security"])
    assert done.exit_code == 2
    assert "need --adopt" in done.output


def test_metadata_in_a_directory_of_their_own(kafka: Path, tmp_path: Path) -> None:
    """Kafka's metadata.log.dir apart from log.dirs."""
    apart = tmp_path / "apart"
    apart.mkdir()
    shutil.move(kafka / layout.METADATA_LOG, apart / layout.METADATA_LOG)
    adopt(fixtures.config(kafka), Disk(), kafka_metadata=str(apart))
    assert (kafka / layout.ADOPTED).exists()


def test_metadata_of_somebody_else_are_not_overwritten(kafka: Path) -> None:
    config = fixtures.config(kafka)
    Path(config.metadata_log_dir).mkdir()
    Path(config.metadata_log_dir, "mine").touch()
    with pytest.raises(DirectoryRefused, match=r"is not empty \(it holds mine\)"):
        adopt(config, Disk())


def test_a_new_volume_is_an_empty_metadata_directory(kafka: Path) -> None:
    config = fixtures.config(kafka)
    folder = Path(config.metadata_log_dir, "lost+found")
    folder.mkdir(parents=True)
    adopt(config, Disk())
    assert folder.is_dir()
    files = open_metadata_files(config.metadata_log_dir, Disk(), ANOTHER)
    assert files.wal.last_index == 132


class Crash(Exception):
    """Power is cut."""


def test_a_crash_anywhere_is_cured_by_the_same_command(tmp_path: Path) -> None:
    """After each write of the taking over in turn; without all marks nothing else opens it."""
    step = 0
    while True:
        kafka = fixtures.copy("n0", tmp_path / f"data{step}")
        config = fixtures.config(kafka)
        try:
            adopt(config, _Falling(step))
        except Crash:
            pass
        else:
            break
        if not (kafka / layout.ADOPTED).exists():
            with pytest.raises(DirectoryRefused, match="--adopt"):
                refuse_kafka(Disk(), str(kafka))
        adopt(config, Disk())
        files = open_metadata_files(config.metadata_log_dir, Disk(), ANOTHER)
        assert files.wal.last_index == 132
        assert checkpoints.read_properties(Disk(), str(kafka / layout.ADOPTED))
        assert not Path(config.metadata_log_dir, "adopting").exists()
        step += 1
    assert step >= 6


class _Falling(Disk):
    """A disk whose process dies before the n-th replacement of a file."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def write_atomic(self, path: str, data: object, *, sync_name: bool = True) -> None:
        if self._left == 0:
            raise Crash(path)
        self._left -= 1
        super().write_atomic(path, data, sync_name=sync_name)  # type: ignore[arg-type]
