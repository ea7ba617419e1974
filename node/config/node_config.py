"""The settings of one node: gathered, checked against each other, frozen and typed.

:meth:`NodeConfig.load` reads a file, the environment and overrides (``kept.node.config.sources``)
and refuses, with ConfigurationError, what is unknown, out of range or contradictory. A NodeConfig
has one attribute for each honoured setting: its name with dots as underscores, a leading ``kept.``
dropped. Settings changed while the node runs are laid over with :meth:`NodeConfig.with_dynamic`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from kept.node.config.config_def import Layers, Source
from kept.node.config.definitions import BROKER_SETTINGS, HONOURED, TOPIC_SETTINGS, NodeSettings
from kept.node.config.listener_settings import PREFIX, check_listeners, split
from kept.node.config.listeners import (
    ConfiguredVoter,
    ListenerConfig,
    ListenerRole,
    parse_voters,
    resolve,
)
from kept.node.config.sasl import check_logins
from kept.node.config.security_checks import check_authorizer
from kept.node.config.sources import ShorthandFlags, gather, is_sensitive, located
from kept.node.config.topic_config import default_from_broker, validate_topic
from kept.node.config.unsupported_settings import REFUSED_PREFIXES
from kept.storage.errors import ConfigurationError, InvalidConfig
from kept.storage.types import MAX_INT32

DEFAULT_DATA_DIR: Final = "./data"


def attribute(name: str) -> str:
    """The attribute of NodeConfig that holds a setting."""
    return name.removeprefix("kept.").replace(".", "_")


class NodeConfig(NodeSettings):
    """A node's settings. Frozen; see ``docs/configuration.md`` for the meaning of each.

    ``given`` are the settings that file, environment or flags gave, as text; ``dynamic_own`` and
    ``dynamic_default`` those changed through AlterConfigs for this node and for all nodes.
    """

    given: Mapping[str, str]
    _of_node: Mapping[str, str]
    _of_listeners: Mapping[str, Mapping[str, str]]
    dynamic_own: Mapping[str, str]
    dynamic_default: Mapping[str, str]

    node_listener: ListenerConfig | None
    advertised_node_listener: ListenerConfig | None

    def __init__(
        self,
        given: Mapping[str, str] | None = None,
        *,
        dynamic_own: Mapping[str, str] | None = None,
        dynamic_default: Mapping[str, str] | None = None,
    ) -> None:
        """Settings by name, as text. Raises ConfigurationError."""
        attributes = self.__dict__
        attributes["given"] = dict(given or {})
        of_node, of_listeners = split(attributes["given"])
        attributes["_of_node"], attributes["_of_listeners"] = of_node, of_listeners
        attributes["dynamic_own"] = dict(dynamic_own or {})
        attributes["dynamic_default"] = dict(dynamic_default or {})
        try:
            values = {name: setting.parse_default() for name, setting in HONOURED.items()}
            for _, layer in reversed(self.layers):
                values.update(BROKER_SETTINGS.parse(layer))
            for name, own in of_listeners.items():
                try:
                    BROKER_SETTINGS.parse(own)
                except InvalidConfig as error:
                    raise ConfigurationError(f"{PREFIX}{name}: {error}") from error
            for name in HONOURED:
                attributes[attribute(name)] = values[name]
            self._resolve()
            validate_topic({}, self.topic_defaults())
        except InvalidConfig as error:
            raise ConfigurationError(str(error)) from error

    @classmethod
    def load(
        cls,
        file: str | None = None,
        overrides: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        port: int | None = None,
        data_dir: str | None = None,
        node_id: int | None = None,
    ) -> NodeConfig:
        """The settings of file, environment (``os.environ`` unless given) and overrides.

        ``port``, ``data_dir`` and ``node_id`` are the command line's short forms. Raises
        ConfigurationError, whose message names the setting, what is wrong and what would be right.
        """
        sources = (
            file,
            overrides or {},
            os.environ if environ is None else environ,
            ShorthandFlags(port, data_dir, node_id),
        )
        given = gather(*sources, names=BROKER_SETTINGS, refused_prefixes=REFUSED_PREFIXES)
        try:
            config = cls(given)
            for listener in config.listeners:
                check_logins(config, listener)
            return config
        except ConfigurationError as error:
            raise ConfigurationError(located(str(error), *sources, names=given)) from error

    def with_dynamic(self, own: Mapping[str, str], default: Mapping[str, str]) -> NodeConfig:
        """The same node's settings with those changed at run time, for itself and for all nodes.

        Names that do not exist are passed over: a newer version may have let them in.
        """
        known = [
            {name: text for name, text in layer.items() if name in BROKER_SETTINGS}
            for layer in (own, default)
        ]
        return NodeConfig(self.given, dynamic_own=known[0], dynamic_default=known[1])

    @property
    def is_broker(self) -> bool:
        """Whether it holds partitions; a controller alone has no log directories."""
        return "broker" in self.process_roles

    @property
    def layers(self) -> Layers:
        """All settings given, the strongest first."""
        return (
            (Source.DYNAMIC_BROKER_CONFIG, self.dynamic_own),
            (Source.DYNAMIC_DEFAULT_BROKER_CONFIG, self.dynamic_default),
            (Source.STATIC_BROKER_CONFIG, self._of_node),
        )

    def of_listener(self, name: str) -> NodeConfig:
        """The same settings as they hold on one listener: ``listener.name.<name>.`` is laid over
        them, also over what was changed while the node runs.
        """
        own = self._of_listeners.get(name.lower())
        if not own:
            return self
        dynamic = [
            {name: text for name, text in layer.items() if name not in own}
            for layer in (self.dynamic_own, self.dynamic_default)
        ]
        return NodeConfig({**self.given, **own}, dynamic_own=dynamic[0], dynamic_default=dynamic[1])

    def own_max_connections(self, name: str) -> int:
        """How many connections a listener may have, whatever the others have."""
        return self._own_number(name, "max.connections")

    def own_connection_creation_rate(self, name: str) -> int:
        """How many connections a second a listener accepts, whatever the others do."""
        return self._own_number(name, "max.connection.creation.rate")

    def _own_number(self, name: str, setting: str) -> int:
        text = self._of_listeners.get(name.lower(), {}).get(setting)
        return MAX_INT32 if text is None else int(BROKER_SETTINGS[setting].parse(text))

    def tls_client_auth(self, listener: ListenerConfig) -> str:
        """``none``, ``requested`` or ``required``: whether clients of a listener show a
        certificate. Between nodes always.

        With SASL_SSL only the setting with the listener's prefix counts, as in Kafka
        (``ChannelBuilders``): certificates for all would be asked of those who log in by password.
        """
        if self.node_listener is not None and listener.name == self.node_listener.name:
            return "required"
        own = self._of_listeners.get(listener.name.lower(), {})
        if listener.protocol == "SASL_SSL" and "ssl.client.auth" not in own:
            return "none"
        return self.of_listener(listener.name).ssl_client_auth

    def tls_properties(self) -> dict[str, str | None]:
        """The settings of TLS, as :func:`kept.client.security.tls.tls_config` wants them."""
        from kept.client.security.tls import DEFAULTS

        return {name: self._tls_value(name) for name in DEFAULTS}

    def _tls_value(self, name: str) -> str | None:
        value = getattr(self, attribute(name))
        return ",".join(value) if isinstance(value, tuple) else value

    def topic_defaults(self) -> dict[str, str]:
        """Topic settings that the broker's settings change, as text: for ``log_config``."""
        defaults = {}
        for name, setting in TOPIC_SETTINGS.items():
            text = default_from_broker(setting, BROKER_SETTINGS, self.layers)
            if text is not None:
                defaults[name] = text
        return defaults

    def text(self, name: str) -> str | None:
        """The effective value of a setting as DescribeConfigs shows it."""
        for _, layer in self.layers:
            if name in layer:
                setting = BROKER_SETTINGS[name]
                return setting.text(setting.parse(layer[name]))
        if name in _RESOLVED:
            value = getattr(self, attribute(name))
            return ",".join(str(item) for item in value) if isinstance(value, tuple) else str(value)
        setting = BROKER_SETTINGS[name]
        return setting.text(setting.parse_default())

    def _resolve(self) -> None:
        """Check settings against each other, and fill in those that follow from others."""
        attributes = self.__dict__
        self._resolve_identity(attributes)
        self._resolve_directories(attributes)
        own = [v for v in self.controller_quorum_voters if v.node_id == self.node_id]
        addresses = resolve(
            attributes["listeners"],
            attributes["advertised_listeners"],
            attributes["listener_security_protocol_map"],
            self.inter_broker_listener_name,
            self.controller_listener_names,
            role=ListenerRole(
                alone=self._names_no_other_node,
                broker="broker" in self.process_roles,
                voter=own[0] if own else None,
            ),
        )
        attributes["listeners"] = addresses.client
        attributes["advertised_listeners"] = addresses.advertised
        attributes["node_listener"] = addresses.node
        attributes["advertised_node_listener"] = addresses.advertised_node
        node = () if addresses.node is None else (addresses.node,)
        bound = [listener.name for listener in (*addresses.client, *node)]
        check_listeners(self._of_listeners, bound)
        if "group.initial.rebalance.delay.ms" not in self.given and self.alone:
            attributes["group_initial_rebalance_delay_ms"] = 0
        for name in (
            "inflight_max_bytes_per_ip",
            "inflating_max_bytes",
            "waiting_max_bytes",
            "responses_max_bytes",
        ):
            if attributes[name] is None:
                attributes[name] = self.inflight_max_bytes // 4
        check_authorizer(self)
        self._check_times()

    @property
    def alone(self) -> bool:
        """A cluster of one that nobody else can join: no other voter, no node listener."""
        return self.node_listener is None

    @property
    def _names_no_other_node(self) -> bool:
        both = set(self.process_roles) == {"broker", "controller"}
        return both and len(self.controller_quorum_voters) <= 1

    def _check_times(self) -> None:
        if self.group_min_session_timeout_ms > self.group_max_session_timeout_ms:
            raise ConfigurationError(
                f"group.min.session.timeout.ms ({self.group_min_session_timeout_ms}) is above "
                f"group.max.session.timeout.ms ({self.group_max_session_timeout_ms})"
            )
        beat, stall = self.broker_heartbeat_interval_ms, self.stall_ms
        if beat + stall >= self.broker_session_timeout_ms:
            raise ConfigurationError(
                f"broker.heartbeat.interval.ms ({beat}) and kept.stall.ms ({stall}) together must "
                f"be below broker.session.timeout.ms ({self.broker_session_timeout_ms}): else a "
                "node that was fenced while it stood still would go on serving"
            )
        if self.replica_fetch_wait_max_ms > self.replica_lag_time_max_ms:
            raise ConfigurationError(
                f"replica.fetch.wait.max.ms ({self.replica_fetch_wait_max_ms}) is above "
                f"replica.lag.time.max.ms ({self.replica_lag_time_max_ms}): idle followers would "
                "leave the ISR"
            )

    def _resolve_identity(self, here: dict[str, Any]) -> None:
        if self.broker_id is not None and self.broker_id >= 0:
            if "node.id" in self.given and self.node_id != self.broker_id:
                raise ConfigurationError(
                    f"node.id={self.node_id} and broker.id={self.broker_id} contradict each other"
                )
            here["node_id"] = self.broker_id
        here["broker_id"] = self.node_id
        voters = parse_voters(here["controller_quorum_voters"])
        here["controller_quorum_voters"] = voters
        self._check_roles(voters)

    def _check_roles(self, voters: tuple[ConfiguredVoter, ...]) -> None:
        """Whether roles, id and voters say the same."""
        roles = set(self.process_roles)
        shown = ",".join(self.process_roles)
        if not roles:
            raise ConfigurationError("process.roles is empty: broker, controller, or both")
        if not voters and roles != {"broker", "controller"}:
            raise ConfigurationError(
                f"process.roles={shown} needs controller.quorum.voters: name every controller, as "
                "in 0@node-0:10092. (A cluster of one is broker,controller.)"
            )
        kafkas = self.given.get("controller.quorum.bootstrap.servers", "").split(",")
        if not voters and len(kafkas) > 1:
            raise ConfigurationError(
                f"controller.quorum.bootstrap.servers names {len(kafkas)} controllers, and without "
                "controller.quorum.voters this node would be a cluster of its own: name them there "
                "with their ids, as in 0@node-0:10092"
            )
        if not voters:
            return
        if "node.id" not in self.given and "broker.id" not in self.given and len(voters) > 1:
            raise ConfigurationError(
                f"node.id is not set, but controller.quorum.voters names {len(voters)} nodes: say "
                "which one this is, or a number of its own if it is a broker only"
            )
        ids = [voter.node_id for voter in voters]
        listed = self.node_id in ids
        if "controller" in roles and not listed:
            raise ConfigurationError(
                f"controller.quorum.voters names no node {self.node_id}, which is this node.id: "
                f"add {self.node_id}@host:port with its node port, or set process.roles=broker"
            )
        if "controller" not in roles and listed:
            raise ConfigurationError(
                f"controller.quorum.voters names node {self.node_id}, which is this node.id, but "
                f"process.roles={shown}: add controller to it, or take node {self.node_id} out of "
                "the voters"
            )

    def _resolve_directories(self, here: dict[str, Any]) -> None:
        if self.log_dir is not None and here["log_dirs"] not in (None, self.log_dir):
            raise ConfigurationError("log.dir and log.dirs contradict each other; give log.dirs")
        if here["log_dirs"] == ():
            raise ConfigurationError("log.dirs is empty: name at least one directory")
        dirs = here["log_dirs"] or self.log_dir
        metadata = here["metadata_log_dir"]
        if dirs is None:
            dirs = (f"{DEFAULT_DATA_DIR}/log",)
            metadata = metadata or f"{DEFAULT_DATA_DIR}/meta"
        here["log_dirs"] = dirs
        here["metadata_log_dir"] = metadata = metadata or dirs[0].rstrip("/") + "-meta"
        paths = [os.path.abspath(path) for path in dirs]
        for index, path in enumerate(paths):
            for other in paths[:index]:
                if path == other or path.startswith(other + "/") or other.startswith(path + "/"):
                    raise ConfigurationError(f"log.dirs: {path} and {other} overlap")
        inside = os.path.abspath(metadata)
        for path in paths:
            if inside == path or inside.startswith(path + "/") or path.startswith(inside + "/"):
                raise ConfigurationError(
                    f"metadata.log.dir={metadata} and log.dirs={path} must not contain each other"
                )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"NodeConfig is frozen: {name} cannot be set")

    def __repr__(self) -> str:
        shown = {
            name: "[hidden]" if is_sensitive(name) else text for name, text in self.given.items()
        }
        return f"NodeConfig({shown})"


_RESOLVED: Final = frozenset(
    {
        "node.id",
        "broker.id",
        "log.dirs",
        "metadata.log.dir",
        "advertised.listeners",
        "group.initial.rebalance.delay.ms",
        "kept.inflight.max.bytes.per.ip",
        "kept.inflating.max.bytes",
        "kept.waiting.max.bytes",
    }
)
"""Settings whose value, when none is given, follows from others."""
