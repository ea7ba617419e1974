"""``TOPIC:PARTITION`` on the command line."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import click

from kept.cli.completion import topics_and_partitions
from kept.storage.types import decimal_number

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def topic_and_partition(text: str) -> tuple[str, int | None]:
    """What ``TOPIC`` or ``TOPIC:P`` names; a usage error for any other text."""
    topic, colon, number = text.partition(":")
    partition = decimal_number(number)
    if not topic or (colon and partition is None):
        raise click.UsageError(f"{text!r} is neither TOPIC nor TOPIC:PARTITION")
    return topic, partition


class TopicPartitionArgument(click.ParamType):  # type: ignore[type-arg]
    """``TOPIC:PARTITION`` as (topic, partition); unless ``whole_topic`` is False, ``TOPIC`` alone
    as (topic, None).
    """

    name = "topic:partition"

    def __init__(self, *, whole_topic: bool = True) -> None:
        self.whole_topic = whole_topic

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int | None]:
        """(topic, partition); a usage error for any other text."""
        if not isinstance(value, str):
            topic, partition = value
            return topic, partition
        topic, partition = topic_and_partition(value)
        if partition is None and not self.whole_topic:
            self.fail(f"{value!r} names no partition: give TOPIC:PARTITION", param, ctx)
        return topic, partition

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,
        incomplete: str,
    ) -> list[CompletionItem[str]]:
        """Topics, and behind a colon the partitions of that topic."""
        return topics_and_partitions(ctx, param, incomplete, whole_topic=self.whole_topic)


class PartitionCommand(click.Command):
    """A command whose ``TOPIC:PARTITION`` may also be given as ``TOPIC PARTITION``, as it was
    before there was one syntax.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; where that fails, once more with the old syntax made the new one."""
        try:
            return super().parse_args(ctx, list(args))
        except click.UsageError:
            for at, (topic, number) in enumerate(itertools.pairwise(args)):
                is_topic = not topic.startswith("-") and ":" not in topic and not topic.isdigit()
                if is_topic and decimal_number(number) is not None:
                    joined = [*args[:at], f"{topic}:{number}", *args[at + 2 :]]
                    with contextlib.suppress(click.UsageError):
                        return super().parse_args(ctx, joined)
            raise
