"""Where a node's settings come from: a YAML file, the environment, ``--set`` and its flags.

Each source gives names and texts; :func:`gather` lays them over each other, the strongest last:
file, environment (``KEPT_LOG_SEGMENT_BYTES``), ``--set``. What Kubernetes injects for services
named kept… (``KEPT_PORT_9092_TCP=tcp://…``, ``KEPT_SERVICE_HOST``) is not ours and is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from kept.node.config.config_def import nearest, unknown_name
from kept.node.config.definitions import BROKER_SETTINGS
from kept.node.config.listener_settings import PREFIX, from_variable
from kept.storage.errors import ConfigurationError

NOT_SETTINGS: Final = frozenset(
    {
        "KEPT_KERNEL",
        "KEPT_REQUIRE_KERNELS",
        "KEPT_FAIL_POINT",
        "KEPT_BOOTSTRAP",
        "KEPT_COMMAND_CONFIG",
        "KEPT_CONTEXT",
        "KEPT_TRACEBACK",
    }
)
"""Variables of ours that are no settings: choice of kernel, the build's demand for them, fail
points, where commands go and how they fail."""

KERNELS: Final = ("python", "cython")
"""What ``KEPT_KERNEL`` may say; the compiled ones are taken anyway where there are any."""

_KUBERNETES: Final = re.compile(
    r"KEPT_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?"
    r"|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_KUBERNETES_URL: Final = re.compile(r"(?:tcp|udp|sctp)://\S+")

_QUOTED: Final = re.compile(r"""(?<=alias |nchor |andle |e tag )(['"]).+\1""")
"""What a complaint of yaml quotes of a value: the name of an alias, an anchor or a tag."""

MERGE_TAG: Final = "tag:yaml.org,2002:merge"
"""Of the key ``<<``: the entries of other mappings stand here, too."""
MAX_FILE_BYTES: Final = 1 << 20
"""A configuration file is a few lines; more is somebody else's file."""


def is_sensitive(name: str) -> bool:
    """Whether a setting of the node, or of one listener, is a secret."""
    setting = BROKER_SETTINGS.get(name.split(".", 3)[-1] if name.startswith(PREFIX) else name)
    return setting is not None and setting.sensitive


def variable(name: str) -> str:
    """The environment variable of a setting: KEPT_ and its name, a leading ``kept.`` dropped."""
    return "KEPT_" + name.removeprefix("kept.").upper().replace(".", "_").replace("-", "_")


def from_environment(environ: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Settings given by ``KEPT_…`` variables. Raises ConfigurationError for an unknown one."""
    by_variable = {variable(name): name for name in names}
    settings = {}
    kernel = environ.get("KEPT_KERNEL", "")
    if kernel and kernel not in KERNELS:
        raise ConfigurationError(f"KEPT_KERNEL={kernel} is not one of {', '.join(KERNELS)}")
    for key, text in environ.items():
        if not key.startswith("KEPT_") or key in NOT_SETTINGS:
            continue
        name = by_variable.get(key)
        name = name or from_variable(key)
        if name is not None:
            settings[name] = text
        elif not _is_kubernetes(key, text):
            near = nearest(key[5:], [known[5:] for known in by_variable])  # KEPT_ is no likeness
            hint = f"; did you mean KEPT_{near}?" if near else ""
            raise ConfigurationError(f"environment variable {key} names no setting{hint}")
    return settings


def _is_kubernetes(key: str, text: str) -> bool:
    if _KUBERNETES.fullmatch(key):
        return True
    return "_PORT" in key and _KUBERNETES_URL.fullmatch(text) is not None


def from_file(path: str) -> dict[str, str]:
    """Settings in a YAML file, flat or nested by dots. Raises ConfigurationError."""
    import yaml

    try:
        with open(path, "rb") as source:
            data = source.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{path}: larger than {MAX_FILE_BYTES} bytes; not a configuration")
    try:
        _refuse_mappings(path, yaml.compose(data, Loader=yaml.SafeLoader))
        tree = yaml.load(data, Loader=_loader())
    except yaml.MarkedYAMLError as error:  # whose text shows the line, and the secret in it
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = _QUOTED.sub("…", str(error.problem))
        hint = "; a value that begins with * & ! or % stands in quotes" * ("…" in problem)
        raise ConfigurationError(f"{path}: not YAML: {where}{problem}{hint}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        shown = " ".join(str(error).split())
        raise ConfigurationError(f"{path}: not YAML: {shown}") from None
    except (ValueError, KeyError, AttributeError):  # of a scalar, which their text may show
        raise ConfigurationError(
            f"{path}: not YAML: a value is not of the type that its form or its tag says; text "
            "stands in quotes"
        ) from None
    except RecursionError:
        raise ConfigurationError(
            f"{path}: not a configuration: nested too deep, or within itself"
        ) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        hint = (
            ""
            if not isinstance(tree, str) or "=" not in tree
            else (
                "; this looks like a .properties file: write `name: value` instead of `name=value`"
            )
        )
        raise ConfigurationError(f"{path}: not a mapping of names to values{hint}")
    settings: dict[str, str] = {}
    _flatten(path, "", tree, settings)
    return settings


def _refuse_mappings(path: str, root: Any) -> None:
    """Refuse a mapping where a secret is expected, before any complaint names a key of it."""
    from yaml import MappingNode

    for name, key, value in _entries(root):
        if isinstance(value, MappingNode) and is_sensitive(name):
            line = key.start_mark.line + 1
            raise ConfigurationError(
                f"{path} line {line}: {name} is a mapping; give text, in quotes"
            )


def _entries(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, node of the key, node of the value) of what a YAML tree gives, outer names first."""
    from yaml import MappingNode, SequenceNode

    for key, value in node.value if isinstance(node, MappingNode) else ():
        if key.tag == MERGE_TAG:
            merged = value.value if isinstance(value, SequenceNode) else (value,)
            for part in merged:
                yield from _entries(part, prefix)
            continue
        name = f"{prefix}{key.value}"
        yield name, key, value
        yield from _entries(value, f"{name}.")


def _loader() -> Any:
    """yaml's safe loader, which besides refuses a name that is given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
            twice = {key for key in keys if keys.count(key) > 1}
            if twice:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{min(twice)} is given twice", node.start_mark
                )
            return super().construct_mapping(node, deep)

    return Loader


def _flatten(path: str, prefix: str, tree: Mapping[Any, Any], flat: dict[str, str]) -> None:
    for key, value in tree.items():
        if not isinstance(key, str):
            raise ConfigurationError(f"{path}: {prefix}{key} is not a name")
        name = prefix + key
        if isinstance(value, dict):
            _flatten(path, name + ".", value, flat)
        elif name in flat:
            raise ConfigurationError(f"{path}: {name} is given twice, flat and nested")
        elif value is not None:
            flat[name] = _text(path, name, value)


def _text(path: str, name: str, value: Any) -> str:
    """A YAML value as the text that a user would have given to ``--set``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(isinstance(v, str | int) for v in value):
        return ",".join(_text(path, name, item) for item in value)
    raise ConfigurationError(
        f"{path}: {name} is a {type(value).__name__}; give text, a number or a list"
    )


class ShorthandFlags:
    """``--port``, ``--data-dir`` and ``--node-id``: short for settings, refused beside them."""

    def __init__(
        self, port: int | None = None, data_dir: str | None = None, node_id: int | None = None
    ) -> None:
        self.settings: list[tuple[str, dict[str, str]]] = []
        if port is not None:
            if not 0 <= port <= 65535:
                raise ConfigurationError(f"--port {port}: a port is 0 to 65535")
            self.settings.append(("--port", {"listeners": f"PLAINTEXT://localhost:{port}"}))
        if data_dir is not None:
            dirs = {"log.dirs": f"{data_dir}/log", "metadata.log.dir": f"{data_dir}/meta"}
            self.settings.append(("--data-dir", dirs))
        if node_id is not None:
            self.settings.append(("--node-id", {"node.id": str(node_id)}))

    def lay_over(self, given: dict[str, str]) -> None:
        """Add to the settings given. Raises ConfigurationError where both say something."""
        aliases = {"log.dirs": "log.dir"}
        for flag, settings in self.settings:
            for name, text in settings.items():
                for other in (name, aliases.get(name, name)):
                    if other in given and given[other] != text:
                        raise ConfigurationError(
                            f"{flag} and {other} contradict each other: {flag} means "
                            f"{name}={text}, but {other}={given[other]} is given too"
                        )
            given.update(settings)


def gather(
    file: str | None,
    overrides: Mapping[str, str],
    environ: Mapping[str, str],
    shorthand: ShorthandFlags,
    *,
    names: Collection[str],
    refused_prefixes: Mapping[str, str],
) -> dict[str, str]:
    """All settings given, by name. Raises ConfigurationError for a name that does not exist."""
    given: dict[str, str] = {}
    from_where: tuple[tuple[str, Mapping[str, str]], ...] = (
        (f"{file}: ", from_file(file) if file is not None else {}),
        ("", from_environment(environ, names)),
        ("", overrides),
    )
    for where, settings in from_where:
        for name in settings:
            if name not in names and not name.startswith(PREFIX):
                line = _line(file, name) if where and file is not None else None
                place = where if line is None else f"{file} line {line}: "
                raise ConfigurationError(place + _unknown(name, names, refused_prefixes))
        given.update(settings)
    shorthand.lay_over(given)
    return given


def _unknown(name: str, names: Collection[str], refused_prefixes: Mapping[str, str]) -> str:
    for prefix, why in refused_prefixes.items():
        if name.startswith(prefix):
            return f"{name}: refused, since {why}"
    return unknown_name("broker", name, names)


def located(
    message: str,
    file: str | None,
    overrides: Mapping[str, str],
    environ: Mapping[str, str],
    shorthand: ShorthandFlags,
    *,
    names: Collection[str],
) -> str:
    """A refusal with where the settings that it names were given: file and line, variable, flag."""
    flags = {name: flag for flag, settings in shorthand.settings for name in settings}
    given = {} if file is None else from_file(file)
    places = {}
    for name in names:
        if not re.search(rf"(?<![\w.]){re.escape(name)}(?!\.?\w)", message):
            continue
        if name in flags:
            places[name] = flags[name]
        elif name in overrides:
            places[name] = f"--set {name}"
        elif variable(name) in environ:
            places[name] = f"environment variable {variable(name)}"
        elif name in given:
            line = _line(file or "", name)
            places[name] = f"{file}" if line is None else f"{file} line {line}"
    if not places:
        return message
    if len(places) == 1:
        return f"{next(iter(places.values()))}: {message}"
    given_by = ", ".join(f"{name} by {place}" for name, place in places.items())
    return f"{message} (given: {given_by})"


def _line(path: str, name: str) -> int | None:
    """The line of a setting in a YAML file, flat or nested; None when it is not found."""
    import yaml

    try:
        with open(path, "rb") as source:
            root = yaml.compose(source, Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError):
        return None
    lines = (key.start_mark.line + 1 for found, key, _ in _entries(root) if found == name)
    return next(lines, None)
