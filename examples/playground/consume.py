"""Consume a compacted topic: every record (log), or the table that the records make (view).

python consume.py -t my_topic -m view -s 0.1
python consume.py -t my_topic -m log --until-end
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

WIDTH = 60


def assign(consumer: Consumer, topic: str) -> list[TopicPartition]:
    """All partitions, from their beginning."""
    known = consumer.list_topics(topic, timeout=30).topics[topic]
    if known.error is not None:
        sys.exit(f"{topic}: {known.error.str()}")
    partitions = [TopicPartition(topic, p, OFFSET_BEGINNING) for p in known.partitions]
    consumer.assign(partitions)
    return partitions


def text(data: bytes | None) -> str:
    """Bytes as a line that fits."""
    if data is None:
        return "(none)"
    line = data.decode(errors="replace")
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


class View:
    """The latest value of every key."""

    def __init__(self) -> None:
        self.state: dict[bytes, Message] = {}
        self.records = self.tombstones = 0

    def take(self, message: Message) -> None:
        self.records += 1
        key = message.key()
        if message.value() is None:
            self.tombstones += 1
            self.state.pop(key, None)
        else:
            self.state[key] = message

    def show(self) -> None:
        if sys.stdout.isatty():
            print("\033[2J\033[H", end="")
        print(f"{'KEY':<20} {'PARTITION':>9} {'OFFSET':>9}  VALUE")
        for key in sorted(self.state):
            m = self.state[key]
            print(f"{text(key):<20} {m.partition():>9} {m.offset():>9}  {text(m.value())}")
        print(f"{len(self.state)} keys from {self.records} records, {self.tombstones} tombstones")
        sys.stdout.flush()


def show_record(message: Message) -> None:
    value = "(tombstone)" if message.value() is None else text(message.value())
    place = f"{message.partition()}:{message.offset()}"
    print(f"{place:<12} {text(message.key()):<20} {value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Consume a topic as a log or as a table.")
    parser.add_argument("-t", "--topic", required=True)
    parser.add_argument("-m", "--mode", choices=["view", "log"], default="view")
    parser.add_argument("-s", "--sleep", type=float, default=0.5, help="seconds between two views")
    parser.add_argument("--until-end", action="store_true", help="stop at the end of the topic")
    parser.add_argument(
        "-b", "--bootstrap", default=os.environ.get("KEPT_BOOTSTRAP", "localhost:9092")
    )
    arguments = parser.parse_args()
    consumer = Consumer(
        {
            "bootstrap.servers": arguments.bootstrap,
            "group.id": "playground",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    reading = {one.partition for one in assign(consumer, arguments.topic)}
    view = View()
    shown = 0.0
    while reading or not arguments.until_end:
        message = consumer.poll(arguments.sleep)
        if message is not None:
            error = message.error()
            if error is None:
                view.take(message)
                if arguments.mode == "log":
                    show_record(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                reading.discard(message.partition())
            else:
                raise KafkaException(error)
        due = time.monotonic() - shown >= arguments.sleep
        if arguments.mode == "view" and due and not arguments.until_end:
            view.show()
            shown = time.monotonic()
    if arguments.mode == "view":
        view.show()
    consumer.close()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except KafkaException as error:
        sys.exit(f"consume.py: {error.args[0].str()}")
