"""Create a topic whose settings come from a properties file.

python create_topic.py -t my_topic -p 1 -c fast_compact.props
"""

from __future__ import annotations

import argparse
import os
import sys

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic


def read_properties(path: str) -> dict[str, str]:
    """KEY=VALUE lines; `#` and `!` begin comments."""
    settings = {}
    with open(path, encoding="utf-8") as source:
        for number, raw in enumerate(source, 1):
            line = raw.strip()
            if not line or line[0] in "#!":
                continue
            name, equals, value = line.partition("=")
            if not equals:
                sys.exit(f"{path}:{number}: {line!r} is not KEY=VALUE")
            settings[name.strip()] = value.strip()
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(description="Create a topic.")
    parser.add_argument("-t", "--topic", required=True)
    parser.add_argument("-p", "--partitions", type=int, default=1)
    parser.add_argument("-c", "--config", metavar="FILE", help="a properties file of settings")
    parser.add_argument(
        "-b", "--bootstrap", default=os.environ.get("KEPT_BOOTSTRAP", "localhost:9092")
    )
    arguments = parser.parse_args()
    config = read_properties(arguments.config) if arguments.config else {}
    admin = AdminClient({"bootstrap.servers": arguments.bootstrap, "log_level": 0})
    topic = NewTopic(arguments.topic, num_partitions=arguments.partitions, config=config)
    try:
        admin.create_topics([topic])[arguments.topic].result(30)
    except KafkaException as error:
        sys.exit(f"{arguments.topic}: {error.args[0].str()}")
    print(f"created {arguments.topic} with {arguments.partitions} partitions")
    for name, value in config.items():
        print(f"  {name}={value}")


if __name__ == "__main__":
    main()
