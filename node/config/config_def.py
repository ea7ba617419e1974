"""What can be set on a topic or a broker: one typed definition for both.

A :class:`ConfigDef` knows its name, type, default, range and meaning, whether it can change while
the node runs, and whether kept honours it or accepts it without effect and why. Validation,
DescribeConfigs, the configuration file and ``docs/configuration.md`` all read it. The definitions
are made from the rows (:class:`Row`) of the table in ``kept.node.config.definitions``.

Messages begin as Kafka's do (``Unknown topic config name: …``, ``Invalid value … for configuration
…``) and go on with the allowed range and the nearest valid name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, Final, Generic, Self, TypeVar, overload

from msgspec import Struct

from kept.storage.errors import InvalidConfig
from kept.storage.types import MAX_INT32, MAX_INT64


class ConfigType(IntEnum):
    """Type of a setting's value; the numbers are those of DescribeConfigs (``ConfigType``)."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7
    CLASS = 8
    PASSWORD = 9


class Source(IntEnum):
    """Where a value comes from; the numbers are those of DescribeConfigs (``ConfigSource``)."""

    DYNAMIC_TOPIC_CONFIG = 1
    DYNAMIC_BROKER_CONFIG = 2
    DYNAMIC_DEFAULT_BROKER_CONFIG = 3
    STATIC_BROKER_CONFIG = 4
    DEFAULT_CONFIG = 5


_BOUNDS: Final = {
    ConfigType.SHORT: (-(2**15), 2**15 - 1),
    ConfigType.INT: (-(2**31), MAX_INT32),
    ConfigType.LONG: (-(2**63), MAX_INT64),
}


class Synonym(Struct, frozen=True):
    """A broker setting that gives a topic setting its default; ``factor`` converts the unit."""

    name: str
    factor: int


class ConfigDef(Struct, frozen=True):
    """One setting of a topic or a broker.

    ``default`` is text as a user would write it; None means unset (Kafka's null). ``low`` and
    ``high`` are inclusive. ``dynamic``: it can change while the node runs. ``no_effect`` says why
    the setting changes nothing here ("": honoured); ``refused`` says why any value but the default
    is refused. ``check`` raises ValueError for what no range expresses.
    """

    name: str
    kind: ConfigType
    default: str | None
    doc: str
    low: float | None = None
    high: float | None = None
    also: tuple[int, ...] = ()
    choices: tuple[str, ...] = ()
    dynamic: bool = True
    synonyms: tuple[Synonym, ...] = ()
    no_effect: str = ""
    refused: str = ""
    check: Callable[[Any], None] | None = None

    @property
    def sensitive(self) -> bool:
        """Whether its value is shown to nobody: that of a secret."""
        return self.kind is ConfigType.PASSWORD

    @property
    def allowed(self) -> str:
        """The values that are allowed, in words; "" where any value of the type is."""
        if self.choices:
            many = "any of " if self.kind is ConfigType.LIST else ""
            return many + ", ".join(self.choices)
        if self.low is None and self.high is None:
            return ""
        low, high = (None if end is None else _plain(end) for end in (self.low, self.high))
        text = f"{low} to {high}" if high is not None else f"at least {low}"
        return text + "".join(f" or {value}" for value in self.also)

    def parse(self, text: str | None) -> Any:
        """The typed value: bool, int, float, str, tuple of str, or None. Raises InvalidConfig."""
        if text is None:
            return None
        try:
            value = _convert(self.kind, text.strip())
            if isinstance(value, tuple):
                value = tuple(dict.fromkeys(value))
            self._check_range(value)
            if self.check is not None:
                self.check(value)
        except ValueError as error:
            raise InvalidConfig(self._complaint(text, str(error))) from None
        if self.refused and value != self.parse_default():
            raise InvalidConfig(self._complaint(text, self.refused))
        return value

    def parse_default(self) -> Any:
        """The default, typed."""
        return None if self.default is None else _convert(self.kind, self.default)

    def text(self, value: Any) -> str | None:
        """A typed value as Kafka writes it."""
        if value is None:
            return None
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, tuple):
            return ",".join(value)
        return str(value)

    def _complaint(self, text: str, why: str) -> str:
        shown = "[hidden]" if self.sensitive else text
        return f"Invalid value {shown} for configuration {self.name}: {why}"

    def _check_range(self, value: Any) -> None:
        if self.choices:
            wrong = [v for v in _as_tuple(value) if v not in self.choices]
            if wrong:
                near = nearest(wrong[0], self.choices)
                hint = f" (did you mean {near}?)" if near else ""
                raise ValueError(f"String must be one of: {', '.join(self.choices)}{hint}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            if value in self.also:
                return
            if self.also and self.low is not None and self.high is not None:
                if not self.low <= value <= self.high:
                    low, high = _plain(self.low), _plain(self.high)
                    other = " or ".join(map(str, self.also))
                    raise ValueError(f"Value must be between {low} and {high} or equal to {other}")
                return
            if self.low is not None and value < self.low:
                raise ValueError(f"Value must be at least {_plain(self.low)}{self._range_hint()}")
            if self.high is not None and value > self.high:
                raise ValueError(
                    f"Value must be no more than {_plain(self.high)}{self._range_hint()}"
                )

    def _range_hint(self) -> str:
        both = self.low is not None and self.high is not None
        return f" (allowed: {self.allowed})" if both else ""


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def _convert(kind: ConfigType, text: str) -> Any:
    """``text`` as a value of ``kind``. Raises ValueError."""
    if kind is ConfigType.BOOLEAN:
        if text.lower() not in ("true", "false"):
            raise ValueError("Expected value to be either true or false")
        return text.lower() == "true"
    if kind in _BOUNDS:
        low, high = _BOUNDS[kind]
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"Not a number of type {kind.name}") from None
        if "_" in text or not text.isascii() or not low <= number <= high:
            raise ValueError(f"Not a number of type {kind.name}")
        return number
    if kind is ConfigType.DOUBLE:
        try:
            fraction = float(text)
        except ValueError:
            raise ValueError("Not a number of type DOUBLE") from None
        if math.isnan(fraction) or "_" in text or not text.isascii():
            raise ValueError("Not a number of type DOUBLE")
        return fraction
    if kind is ConfigType.LIST:
        if not text:
            return ()
        items = tuple(item.strip() for item in text.split(","))
        if "" in items:
            raise ValueError("a list must not have empty entries")
        return items
    return text


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that looks most like ``name``; None when none does."""
    import difflib

    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return matches[0] if matches else None


T = TypeVar("T")


class Row(Generic[T]):
    """A row of the table of settings: all of a :class:`ConfigDef` but the name, which follows from
    the field of the class that holds the row (``fetch_max_bytes``: ``fetch.max.bytes``).

    ``ours``: ``kept.`` stands before the name. ``topic`` is the topic setting that this node
    setting gives its default to; a topic setting has the row's own default, and ``weaker`` are
    further node settings that may give it, with the factor that converts their unit. ``facts`` are
    fields of ConfigDef. ``T`` is the type of the value: mypy takes an instance's field for one,
    and an instance's own value hides the row.
    """

    def __init__(
        self,
        kind: ConfigType,
        default: str | None,
        *,
        ours: bool = False,
        topic: str = "",
        weaker: Mapping[str, int] | None = None,
        dynamic: bool = False,
        **facts: Any,
    ) -> None:
        self.topic = topic
        self._kind = kind
        self._default = default
        self._prefix = "kept." if ours else ""
        self._weaker = weaker or {}
        self._dynamic = dynamic
        self._facts = facts
        self._doc = ""

    def means(self, doc: str) -> Self:
        """The same row with what the setting does."""
        self._doc = doc
        return self

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Self | T:
        return self

    def _name(self, field: str) -> str:
        return self._prefix + field.replace("_", ".")

    def of_node(self, field: str) -> ConfigDef:
        """The definition of the node's setting."""
        doc, default = self._doc, self._default
        if self.topic:
            doc = f"Default of the topic setting {self.topic}: {doc}"
            default = None if self._weaker else default
        dynamic = self._dynamic or bool(self.topic)
        return ConfigDef(
            self._name(field), self._kind, default, doc, dynamic=dynamic, **self._facts
        )

    def of_topic(self, field: str) -> ConfigDef:
        """The definition of the topic's setting."""
        name = self._name(field)
        synonyms = {name: 1, **self._weaker} if self.topic else {}
        return ConfigDef(
            self.topic or name,
            self._kind,
            self._default,
            self._doc,
            synonyms=tuple(Synonym(name, factor) for name, factor in synonyms.items()),
            **self._facts,
        )


class Rows(Generic[T]):
    """Makes rows of one type: ``Rows[int](ConfigType.INT)("1", low=1)``. Without a default also
    None.
    """

    def __init__(self, kind: ConfigType) -> None:
        self._kind = kind

    @overload
    def __call__(self, default: str, **facts: Any) -> Row[T]: ...
    @overload
    def __call__(self, default: None, **facts: Any) -> Row[T | None]: ...
    def __call__(self, default: str | None, **facts: Any) -> Row[T] | Row[T | None]:
        """A row of this kind; ``facts`` as :class:`Row` takes them."""
        return Row(self._kind, default, **facts)


class Settings(Mapping[str, ConfigDef]):
    """Settings by name, in the order given. ``what`` ("topic", "broker") is used in messages."""

    def __init__(self, what: str, settings: Iterable[ConfigDef]) -> None:
        self.what = what
        self._by_name = {setting.name: setting for setting in settings}

    def __getitem__(self, name: str) -> ConfigDef:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> ConfigDef:
        """The setting called ``name``; InvalidConfig with the nearest valid name otherwise."""
        setting = self._by_name.get(name)
        if setting is None:
            raise InvalidConfig(unknown_name(self.what, name, self._by_name))
        return setting

    def parse(self, values: Mapping[str, str | None]) -> dict[str, Any]:
        """Typed values of ``values``. Raises InvalidConfig at the first wrong name or value."""
        return {name: self.find(name).parse(text) for name, text in values.items()}


def unknown_name(what: str, name: str, valid: Iterable[str]) -> str:
    """The message for a setting that does not exist."""
    near = nearest(name, valid)
    hint = f"; did you mean {near}?" if near else ""
    return f"Unknown {what} config name: {name}{hint}"


class SynonymEntry(Struct, frozen=True):
    """One place that a value may come from, strongest first in :class:`Entry`."""

    name: str
    value: str | None
    source: Source


class Entry(Struct, frozen=True):
    """One setting as DescribeConfigs shows it. ``value`` is None for sensitive ones."""

    setting: ConfigDef
    value: str | None
    source: Source
    read_only: bool
    synonyms: tuple[SynonymEntry, ...]

    @property
    def documentation(self) -> str:
        """What the setting means, and whether it does anything here."""
        if self.setting.no_effect:
            return f"{self.setting.doc} Accepted, no effect: {self.setting.no_effect}"
        return self.setting.doc


Layers = tuple[tuple[Source, Mapping[str, str]], ...]
"""Settings given to a broker, strongest first: (source, name -> text)."""


def broker_synonyms(
    settings: Mapping[str, ConfigDef], names: Iterable[str], layers: Layers
) -> tuple[SynonymEntry, ...]:
    """Every place that gives one of the broker settings ``names`` (strongest first) a value.

    Kafka's order (``ConfigHelper.configSynonyms``): by source, then by name. Kafka drops what
    stands before the first of ``names``, so that a topic's retention.ms which comes from
    ``log.retention.hours`` shows as a default; we keep explicit ones.
    """
    names = tuple(names)
    entries = [
        SynonymEntry(name, _shown(settings[name], given[name]), source)
        for source, given in layers
        for name in names
        if name in given and name in settings
    ]
    explicit = bool(entries)
    for name in names:
        setting = settings.get(name)
        if setting is not None and setting.default is not None:
            text = setting.text(setting.parse_default())
            entries.append(SynonymEntry(name, text, Source.DEFAULT_CONFIG))
    if not explicit:
        while entries and entries[0].name != names[0]:
            entries.pop(0)
    return tuple(entries)


def _shown(setting: ConfigDef, text: str) -> str | None:
    return None if setting.sensitive else text
