"""Every message between nodes: there and back, and the bytes it has always had."""

import json
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.cluster.controller.features import Feature
from kept.cluster.controller.heartbeats import ReplicaLog
from kept.cluster.metadata.records import Endpoint
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import Entry
from kept.cluster.raft import messages
from kept.node.config.listeners import ConfiguredVoter as Listed
from kept.node.internode import controller_rpc as rpc
from kept.node.internode import manifest_rpc as manifests
from kept.node.internode import protobuf_conversion
from kept.node.internode.controller_rpc import CALLS, Failure
from kept.node.internode.frames import FrameKind, encode
from kept.node.internode.hello import hello_from, packed, unpacked
from kept.node.internode.identity import Hello
from kept.node.internode.protobuf_conversion import METHODS as NUMBERS
from kept.node.internode.rpc_errors import error_of, failure_of
from kept.replication.manifests_events import ManifestRef
from kept.storage import errors
from kept.storage.errors import CorruptMessage, InvariantViolation, KeptError, NotController
from kept.storage.types import Generation

GOLDEN = Path(__file__).parents[2] / "golden" / "peers_v2.json"
ID = UUID("00112233-4455-6677-8899-aabbccddeeff")
OTHER = UUID("ffeeddcc-bbaa-9988-7766-554433221100")
METHODS = CALLS | manifests.MANIFEST_CALLS
HEAD = {"term": 7, "sender": 1, "to": 2, "directory_id": ID}

RAFT = [
    messages.PreVote(**HEAD, last_index=9, last_term=6),
    messages.PreVote(**HEAD, last_index=9, last_term=6, suspect=0),
    messages.PreVoteReply(**HEAD, granted=True),
    messages.Vote(**HEAD, last_index=9, last_term=6, transfer=True),
    messages.VoteReply(**HEAD, granted=False),
    messages.AppendEntries(**HEAD, prev_index=8, prev_term=6, commit_index=5, round=3),
    messages.AppendEntries(
        **HEAD, prev_index=8, prev_term=6, entries=(Entry(6, 9, b"nine"), Entry(7, 10, b""))
    ),
    messages.AppendEntriesReply(
        **HEAD, accepted=False, match_index=8, hint_index=4, hint_term=2, round=3
    ),
    messages.InstallSnapshot(
        **HEAD,
        last_index=90,
        last_term=6,
        image_bytes=b"image",
        voters=(Voter(1, ID, "a", 1), Voter(2, OTHER)),
        round=4,
    ),
    messages.SnapshotReply(**HEAD, match_index=90, round=4),
    messages.TimeoutNow(**HEAD),
    messages.Observe(**HEAD, last_index=9, last_term=6),
    messages.LeaderHint(**HEAD, leader_id=-1, last_index=3, voters=(0, 1, 2), cluster_id="c"),
    messages.AppendEntries(
        **HEAD, prev_index=8, prev_term=6, acknowledged=8, acknowledged_by=OTHER
    ),
]
"""Each kind; with :func:`test_every_kind_is_here` none can be forgotten."""

NAME = ManifestRef(Generation(2, 7), 5000)
CALL_VALUES = [
    rpc.RegisterRequest(
        3, ID, (Endpoint("PLAINTEXT", "PLAINTEXT", "h", 9092),), "rack", 77, (OTHER,)
    ),
    rpc.RegisterRequest(0, ID, (), None, -1, ()),
    rpc.RegisterRequest(0, ID, (), None, -1, (), (Feature("transaction.version", 2),)),
    rpc.RegisterReply(5),
    rpc.HeartbeatRequest(3, 5, 90, True, True, (ReplicaLog(ID, 1, 2, -1, 0),)),
    rpc.HeartbeatRequest(3, 5, 90, features=(Feature("transaction.version", 2), Feature("f", 0))),
    rpc.HeartbeatReply(True, True, 91),
    rpc.AlterPartitionsRequest(
        3, 5, (rpc.IsrChange(ID, 4, 2, 9, (rpc.IsrMember(3, 5), rpc.IsrMember(1, 2)), 1),)
    ),
    rpc.AlterPartitionsRequest(3, 5, (rpc.IsrChange(ID, 4, 2, 9, (rpc.IsrMember(3, 5),), 0, 6),)),
    rpc.AlterPartitionsReply(
        (
            rpc.IsrResult(ID, 4, None, 3, 2, 10, (3, 1), 0),
            rpc.IsrResult(ID, 5, Failure("NotController", "it is 9", 9), -1, -1, -1, (), 0),
        )
    ),
    rpc.AllocateProducerIdsRequest(3, 5),
    rpc.AllocateProducerIdsReply(1000, 1000),
    rpc.ForwardRequest(19, 7, b"body", "PLAINTEXT", None, "::1"),
    rpc.ForwardRequest(19, 7, b"", "PLAINTEXT", "", "::1"),
    rpc.ForwardRequest(19, 7, b"", "PLAINTEXT", tries=(ID, OTHER)),
    rpc.ForwardRequest(19, 7, b"", "SASL", None, "::1", (), "User:ada", "PLAIN", by_node=True),
    rpc.ForwardReply(b"answer"),
    rpc.ChangeVotersRequest(True, 4, None, "host", 10092),
    rpc.ChangeVotersRequest(False, 4, ID),
    rpc.ChangeVotersReply(12),
    rpc.ConfirmRequest(3, 5),
    rpc.ConfirmReply(12),
    rpc.PeerHttpRequest("GET", "/api/v1/topics", '{"segments": "true"}', "{}"),
    rpc.PeerHttpReply(200, b'{"topics": []}'),
    manifests.PullManifestsRequest(
        3,
        5,
        (
            manifests.ManifestPull(ID, 4, 2, 9, NAME, None, True, 6000, (NAME,)),
            manifests.ManifestPull(ID, 0, 2, 1, None, NAME, False, 0, ()),
        ),
    ),
    manifests.PullManifestsReply(
        (
            manifests.ManifestAnswer(
                None, NAME, None, (manifests.ManifestBody(NAME, 4, 5, b"body"),)
            ),
            manifests.ManifestAnswer(Failure("FencedLeaderEpoch", "epoch 2, now it is 3")),
        )
    ),
    manifests.ManifestChunkRequest(ID, 4, 2, NAME, 1 << 20),
    manifests.ManifestChunkReply(b"piece", 0xFFFFFFFF),
    manifests.ManifestNewsRequest(3, (manifests.ManifestNews(ID, 4, 2),)),
    manifests.ManifestNewsReply(),
    manifests.PullManifestsRequest(
        3, 5, (manifests.ManifestPull(ID, 0, 2, 1, NAME, None, True, 6000, (NAME,), complete=True),)
    ),
    manifests.PullManifestsReply((manifests.ManifestAnswer(None, NAME, complete=True),)),
]

HELLOS = [
    Hello("c", 1, ID),
    Hello("", 0, ID, (Listed(0, "a", 1), Listed(1, "b", 2)), True, OTHER, 0, "why", 1),
    Hello("c", 3, ID, host="node-3", port=10092),
]


def codec_of(value) -> protobuf_conversion.MessageCodec:
    for pair in protobuf_conversion.codecs().calls.values():
        for codec in pair:
            if codec.cls is type(value):
                return codec
    raise AssertionError(f"no call has {type(value)}")


def encoded() -> dict[str, str]:
    """Every value's bytes, by kind and number."""
    found = {}
    for values, to_bytes in (
        (RAFT, protobuf_conversion.encode_raft),
        (CALL_VALUES, lambda v: codec_of(v).to_bytes(v)),
        (HELLOS, packed),
    ):
        for value in values:
            name = type(value).__name__
            number = sum(key.startswith(f"{name}.") for key in found)
            found[f"{name}.{number}"] = to_bytes(value).hex()
    for kind in FrameKind:
        found[f"frame {kind.name}"] = encode(kind, 0x01020304, 5, b"body").hex()
    return found | {f"method {name}": f"{number:04x}" for name, number in NUMBERS.items()}


def test_every_kind_is_here():
    kinds = {
        cls
        for cls in vars(messages).values()
        if isinstance(cls, type) and issubclass(cls, messages.Message)
    } - {messages.Message}
    assert {type(message) for message in RAFT} == kinds == set(protobuf_conversion.RAFT_MESSAGES)
    assert {type(v) for v in CALL_VALUES} == {cls for pair in METHODS.values() for cls in pair}


def test_the_bytes_are_those_of_the_golden_file():
    assert encoded() == json.loads(GOLDEN.read_text()), (
        "the format between nodes changed: nodes of two versions would misunderstand each other"
    )


@pytest.mark.parametrize("message", RAFT, ids=lambda m: type(m).__name__)
def test_raft_messages_come_back(message):
    assert protobuf_conversion.decode_raft(protobuf_conversion.encode_raft(message)) == message


@pytest.mark.parametrize("value", CALL_VALUES, ids=lambda v: type(v).__name__)
def test_calls_come_back(value):
    codec = codec_of(value)
    assert codec.from_bytes(codec.to_bytes(value)) == value


@pytest.mark.parametrize("hello", HELLOS)
def test_hello_comes_back_whole_or_not_at_all(hello):
    data = packed(hello)
    assert unpacked(data + b"more") == (hello, len(data))
    for short in range(len(data)):
        assert unpacked(data[:short]) is None


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\x02\x22\x01"])
def test_a_hello_that_is_none(data):
    with pytest.raises(CorruptMessage):
        unpacked(data)


def test_a_hello_without_an_incarnation_is_refused():
    with pytest.raises(CorruptMessage, match="16 are wanted"):
        hello_from(b"")


def test_a_message_of_an_unknown_kind():
    with pytest.raises(CorruptMessage, match="of no kind"):
        protobuf_conversion.decode_raft(b"")
    with pytest.raises(CorruptMessage, match="not a RaftMessage"):
        protobuf_conversion.decode_raft(b"\xff\xff")


def test_a_dataclass_that_does_not_fit_its_message_is_our_bug():
    from kept.node.proto import controller_pb2

    with pytest.raises(InvariantViolation, match="RegisterReply"):
        protobuf_conversion.MessageCodec(rpc.RegisterReply, controller_pb2.ForwardReply)


uint = st.integers(0, 2**64 - 1)
node = st.integers(0, 2**31 - 1)


@given(
    st.builds(
        messages.AppendEntries,
        term=uint,
        sender=node,
        to=node,
        directory_id=st.uuids(),
        prev_index=uint,
        prev_term=uint,
        commit_index=uint,
        round=uint,
        entries=st.lists(st.builds(Entry, uint, uint, st.binary(max_size=50)), max_size=4).map(
            tuple
        ),
    )
)
def test_appends_of_any_content_come_back(message):
    assert protobuf_conversion.decode_raft(protobuf_conversion.encode_raft(message)) == message


# Errors.


@pytest.mark.parametrize(
    "cls",
    sorted(
        {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, KeptError)},
        key=lambda c: c.__name__,
    ),
    ids=lambda c: c.__name__,
)
def test_an_error_arrives_as_its_class(cls):
    arrived = error_of(Failure(cls.__name__, "what, why, what to do"))
    disk = issubclass(cls, errors.MachineError | errors.DamagedData)
    assert type(arrived) is (errors.KafkaStorageError if disk else cls)
    assert str(arrived) == "what, why, what to do"


def test_errors_that_are_not_ours_or_not_known():
    bug = failure_of(KeyError("x"))
    assert type(error_of(bug)) is InvariantViolation
    assert type(error_of(Failure("InventedIn2030", "m"))) is KeptError
    assert str(error_of(Failure("Exception", "m"))) == "Exception: m"
    assert len(failure_of(KeptError("x" * 9999)).message) == 1000


def test_not_controller_names_the_leader():
    leader = error_of(failure_of(NotController("ask node 2", 2)))
    assert isinstance(leader, NotController)
    assert leader.leader_id == 2
    unknown = error_of(failure_of(NotController("ask later")))
    assert isinstance(unknown, NotController)
    assert unknown.leader_id == -1


if __name__ == "__main__":  # python -m tests...: writes the golden file of a new version
    GOLDEN.write_text(json.dumps(encoded(), indent=1) + "\n")
