"""Structs to protobuf messages and back.

A :class:`MessageCodec` joins a Struct to the message whose fields have the same names, once, as it
is made; what does not match is a bug found at the start, not at three in the morning. A UUID is 16
bytes (none: no bytes), ``tuple[T, ...]`` repeated, ``T | None`` presence, a dataclass a message, a
ManifestRef a ManifestName.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from enum import IntEnum
from functools import cache, partial
from typing import Any, Final, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from kept.cluster.raft import messages
from kept.node.internode.controller_rpc import CALLS, Failure
from kept.node.internode.identity import Hello
from kept.node.internode.manifest_rpc import MANIFEST_CALLS
from kept.node.internode.parse_limits import check_counts
from kept.node.internode.snapshot_chunks import Piece
from kept.replication.manifests_events import ManifestRef
from kept.storage.errors import CorruptMessage, InvariantViolation
from kept.storage.types import Generation

_PLAIN: Final = (int, bool, str, bytes)
_Convert = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _uuid_bytes(value: UUID | None) -> bytes:
    return b"" if value is None else value.bytes


def _uuid(data: bytes) -> UUID:
    if len(data) != 16:
        raise CorruptMessage(f"an id of {len(data)} bytes; 16 are wanted")
    return UUID(bytes=data)


def _uuid_or_none(data: bytes) -> UUID | None:
    return _uuid(data) if data else None


def _manifest_name(message: Any, ref: ManifestRef) -> Any:
    epoch, number = ref.generation
    return message(epoch=epoch, generation=number, end_offset=ref.end_offset)


def _manifest_ref(name: Any) -> ManifestRef:
    return ManifestRef(Generation(name.epoch, name.generation), name.end_offset)


def _names(cls: Any) -> list[str]:
    """Fields of a Struct or NamedTuple; none of anything else."""
    return list(getattr(cls, "__struct_fields__", getattr(cls, "_fields", ())))


class _Field(Struct, frozen=True):
    """How one field travels. ``present``: the message says whether it is there."""

    name: str
    encode: _Convert
    decode: _Convert
    repeated: bool = False
    present: bool = False


class MessageCodec:
    """One Struct and its message."""

    def __init__(self, cls: type, message: Any) -> None:
        self.cls = cls
        self.message = message
        hints = get_type_hints(cls)
        names = _names(cls)
        theirs = list(message.DESCRIPTOR.fields_by_name)
        if sorted(names) != sorted(theirs):
            raise InvariantViolation(f"{cls.__name__} has {names}, its message {theirs}")
        self._fields = [self._field(name, hints[name]) for name in names]
        self._plain = [f.name for f in self._fields if f.encode is _same and not f.present]
        self._plain = [name for name in self._plain if not self._of(name).repeated]
        self._other = [f for f in self._fields if f.name not in self._plain]

    def _of(self, name: str) -> _Field:
        return next(field for field in self._fields if field.name == name)

    def _field(self, name: str, hint: Any) -> _Field:
        descriptor = self.message.DESCRIPTOR.fields_by_name[name]
        origin, args = get_origin(hint), get_args(hint)
        if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
            encode, decode = self._kind(args[0], descriptor)
            return _Field(name, encode, decode, repeated=True)
        if origin in (Union, types.UnionType) and types.NoneType in args:
            (inner,) = [arg for arg in args if arg is not types.NoneType]
            if inner is UUID:
                return _Field(name, _uuid_bytes, _uuid_or_none)
            encode, decode = self._kind(inner, descriptor)
            if not descriptor.has_presence:
                raise InvariantViolation(f"{self.cls.__name__}.{name} must be optional")
            return _Field(name, encode, decode, present=True)
        return _Field(name, *self._kind(hint, descriptor))

    def _kind(self, hint: Any, descriptor: Any) -> tuple[_Convert, _Convert]:
        plain = getattr(hint, "__supertype__", hint)  # NewType
        if plain in _PLAIN:
            return _same, _same
        if plain is UUID:
            return _uuid_bytes, _uuid
        if isinstance(plain, type) and issubclass(plain, IntEnum):
            return int, plain
        if plain is ManifestRef:
            return partial(_manifest_name, descriptor.message_type._concrete_class), _manifest_ref
        if isinstance(plain, type) and _names(plain):
            inner = MessageCodec(plain, descriptor.message_type._concrete_class)
            return inner.encode, inner.decode
        raise InvariantViolation(f"{self.cls.__name__}: no way to send {hint}")

    def encode(self, value: Any) -> Any:
        """The message of a Struct."""
        given = {name: getattr(value, name) for name in self._plain}
        for field in self._other:
            member = getattr(value, field.name)
            if field.repeated:
                if member:
                    given[field.name] = [field.encode(item) for item in member]
            elif not (field.present and member is None):
                given[field.name] = field.encode(member)
        return self.message(**given)

    def decode(self, message: Any) -> Any:
        """The Struct of a message. Raises CorruptMessage."""
        given = {name: getattr(message, name) for name in self._plain}
        for field in self._other:
            name = field.name
            if field.repeated:
                decode = field.decode
                given[name] = tuple([decode(item) for item in getattr(message, name)])
            elif field.present and not message.HasField(name):
                given[name] = None
            else:
                given[name] = field.decode(getattr(message, name))
        return self.cls(**given)

    def to_bytes(self, value: Any) -> bytes:
        """Encoded and serialized."""
        data: bytes = self.encode(value).SerializeToString()
        return data

    def from_bytes(self, data: bytes) -> Any:
        """Parsed and decoded. Raises CorruptMessage."""
        return self.decode(parse(self.message, data))


RAFT_MESSAGES: Final[dict[type, str]] = {
    messages.AppendEntries: "append",
    messages.AppendEntriesReply: "append_reply",
    messages.PreVote: "pre_vote",
    messages.PreVoteReply: "pre_vote_reply",
    messages.Vote: "vote",
    messages.VoteReply: "vote_reply",
    messages.InstallSnapshot: "install_snapshot",
    messages.SnapshotReply: "snapshot_reply",
    messages.TimeoutNow: "timeout_now",
    messages.Observe: "observe",
    messages.LeaderHint: "leader_hint",
}
"""The Raft core's messages, and where they are in ``RaftMessage``."""

METHODS: Final[dict[str, int]] = {
    "Register": 1,
    "Heartbeat": 2,
    "AlterPartitions": 3,
    "AllocateProducerIds": 4,
    "Forward": 5,
    "ChangeVoters": 6,
    "Confirm": 7,
    "PeerHttp": 8,
    "PullManifests": 9,
    "ManifestChunk": 10,
    "ManifestNews": 11,
}
"""Methods by name, with the numbers that they have in frames; a number is never used again."""
METHOD_NAMES: Final = {number: name for name, number in METHODS.items()}


class Codecs:
    """Every message between nodes, joined to its Struct (:func:`codecs`)."""

    def __init__(self) -> None:
        from kept.node.proto import controller_pb2, manifests_pb2, peers_pb2, raft_pb2

        self.hello = MessageCodec(Hello, peers_pb2.Hello)
        self.failure = MessageCodec(Failure, controller_pb2.Failure)
        self.calls: dict[str, tuple[MessageCodec, MessageCodec]] = {}
        """Of the request and the reply of each method."""
        for calls, module in ((CALLS, controller_pb2), (MANIFEST_CALLS, manifests_pb2)):
            for method, (request, reply) in calls.items():
                self.calls[method] = (
                    MessageCodec(request, getattr(module, request.__name__)),
                    MessageCodec(reply, getattr(module, reply.__name__)),
                )
        if self.calls.keys() != METHODS.keys():
            raise InvariantViolation(f"one of {sorted(self.calls)} or {sorted(METHODS)} is missing")
        # Its field is what names a message: the Structs may have other names.
        fields = raft_pb2.RaftMessage()
        self.raft = {
            cls: MessageCodec(cls, type(getattr(fields, n))) for cls, n in RAFT_MESSAGES.items()
        }
        self.raft_by_kind = {name: self.raft[cls] for cls, name in RAFT_MESSAGES.items()}
        self.raft_message = raft_pb2.RaftMessage
        self.snapshot_head = peers_pb2.SnapshotHead
        self.snapshot_chunk = peers_pb2.SnapshotChunk


@cache
def codecs() -> Codecs:
    """The codecs, made once: the first use loads protobuf (10 MB), which a lone node never does.
    Raises InvariantViolation where a message and its Struct differ.
    """
    return Codecs()


def parse(message: Any, data: bytes) -> Any:
    """A protobuf message of a class. Raises CorruptMessage, also for more items than are taken."""
    from google.protobuf.message import DecodeError

    check_counts(message.DESCRIPTOR, data)
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise CorruptMessage(f"not a {message.DESCRIPTOR.name}: {error}") from error


def encode_raft(message: messages.Message) -> bytes:
    """A message of the Raft core, as bytes of a ``RaftMessage``."""
    known, cls = codecs(), type(message)
    wrapped = known.raft_message(**{RAFT_MESSAGES[cls]: known.raft[cls].encode(message)})
    data: bytes = wrapped.SerializeToString()
    return data


def decode_raft(data: bytes) -> messages.Message:
    """Bytes of a ``RaftMessage`` as the Raft core's message. Raises CorruptMessage."""
    known = codecs()
    wrapped = parse(known.raft_message, data)
    kind = wrapped.WhichOneof("kind")
    if kind is None:
        raise CorruptMessage("a Raft message of no kind that is known here")
    decoded: messages.Message = known.raft_by_kind[kind].decode(getattr(wrapped, kind))
    return decoded


def encode_snapshot_head(message: messages.InstallSnapshot) -> bytes:
    """An InstallSnapshot without its image, whose size is told instead."""
    known = codecs()
    bare = replace(message, image_bytes=b"")
    head = known.snapshot_head(
        message=known.raft[messages.InstallSnapshot].encode(bare),
        size_bytes=len(message.image_bytes),
    )
    data: bytes = head.SerializeToString()
    return data


def decode_snapshot_head(data: bytes) -> tuple[messages.InstallSnapshot, int]:
    """The message without its image, and how large that is. Raises CorruptMessage."""
    known = codecs()
    head = parse(known.snapshot_head, data)
    message: messages.InstallSnapshot = known.raft[messages.InstallSnapshot].decode(head.message)
    return message, head.size_bytes


def encode_snapshot_chunk(piece: Piece) -> bytes:
    """A piece of a snapshot's image."""
    data: bytes = codecs().snapshot_chunk(**piece._asdict()).SerializeToString()
    return data


def decode_snapshot_chunk(data: bytes) -> Piece:
    """A piece as it came; its CRC is not checked yet. Raises CorruptMessage."""
    chunk = parse(codecs().snapshot_chunk, data)
    return Piece(chunk.position, chunk.data, chunk.crc)
