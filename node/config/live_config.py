"""The settings in force: those of the start, with what was changed at run time laid over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kept.node.config.node_config import NodeConfig


class LiveConfig:
    """Holds the :class:`NodeConfig` of the moment; read ``current`` anew each time."""

    def __init__(self, config: NodeConfig) -> None:
        self.current = config

    def reload(self, own: Mapping[str, str], default: Mapping[str, str]) -> None:
        """Lay settings of the metadata over those of the start: this broker's ``own``, and those
        of all brokers. Raises ConfigurationError; nothing has changed then.
        """
        if own or default or self.current.dynamic_own or self.current.dynamic_default:
            self.current = self.current.with_dynamic(own, default)
